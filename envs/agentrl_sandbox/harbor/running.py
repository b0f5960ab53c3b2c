"""RUN: the command that one of them runs, and what it asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from agentrl.errors import ConfigError
from agentrl_sandbox.harbor.instructions import HereDocument, Instruction
from agentrl_sandbox.harbor.network import program_with_network
from agentrl_sandbox.harbor.recipe import RunStep

_SHELLS: Final = re.compile(r"(?:^|[;&|]\s*|/)(?:ba|da|z)?sh\b[^;&|\n]*<<")
"""A here-document for one of these is a script."""
_SCRIPT: Final = 'f=/tmp/.agentrl-run; printf %s "$0" > "$f" && chmod 700 "$f" && "$f"; rc=$?; rm -f "$f"; exit "$rc"'
"""Runs a here-document that names its own interpreter."""


def read_run(
    instruction: Instruction,
    text: str,
    options: Mapping[str, str],
    *,
    words: Sequence[str] | None,
    shell: Sequence[str],
    directory: str,
    environment: Mapping[str, str],
) -> RunStep:
    """Return what a RUN does.

    Args:
        instruction: with its here-documents.
        text: the command, without options.
        options: with their values; several of `mount` are lines.
        words: the command where it is a list in JSON, or None.
        shell: that reads a command which is no list.
        directory: in which it runs.
        environment: of the instructions above.

    Raises:
        ConfigError: there is no command, or an option cannot be honoured.
    """
    said = instruction.said
    if not text or words == []:
        raise ConfigError(f"{said}: expected a command, got {instruction.rest!r}")
    asks = program_with_network("\n".join([" ".join(words) if words else text, *_scripts(text, instruction.documents)]))
    folders = () if asks else _cache_folders(options, said)
    argv = tuple(words) if words else _shell_argv(text, instruction.documents, shell)
    return RunStep(
        said=said,
        text=instruction.rest,
        argv=argv,
        directory=directory,
        environment=dict(environment),
        folders=folders,
        network=asks,
    )


def _scripts(text: str, documents: Sequence[HereDocument]) -> list[str]:
    """Return the here-documents that a shell runs."""
    if _is_document(text, documents) or _SHELLS.search(text):
        return [document.text for document in documents]
    return []


def _is_document(text: str, documents: Sequence[HereDocument]) -> bool:
    return len(documents) == 1 and text.strip() == documents[0].written


def _shell_argv(text: str, documents: Sequence[HereDocument], shell: Sequence[str]) -> tuple[str, ...]:
    if _is_document(text, documents):
        script = documents[0].text
        return ("/bin/sh", "-c", _SCRIPT, script) if script.startswith("#!") else (*shell, script)
    lines = [text.rstrip(), *(f"{document.text}{document.name}" for document in documents)]
    return (*shell, "\n".join(lines))


def _cache_folders(options: Mapping[str, str], said: str) -> tuple[str, ...]:
    """Return the directories of caches, which begin empty here; other options that change the file system are refused."""
    folders: list[str] = []
    for name, value in options.items():
        if name == "network" and value in ("none", "default"):
            continue
        if name != "mount":
            raise ConfigError(f"{said}: expected no option but --mount=type=cache and --network, got --{name}={value}")
        for mount in value.split("\n"):
            pairs = (field.partition("=") for field in mount.split(","))
            fields = {key: value for key, _, value in pairs}
            target = fields.get("target") or fields.get("dst") or fields.get("destination") or ""
            if fields.get("type") != "cache" or not target.startswith("/"):
                raise ConfigError(
                    f"{said}: expected --mount=type=cache,target=/DIR, got --mount={mount}; COPY the files, or leave the "
                    "task out"
                )
            folders.append(target)
    return tuple(folders)
