"""Cassette files: one episode, with every answer that it got from outside.

Invariant: a file appears whole or not at all, and is read only if its format and version are known. Nothing in it depends on
when it was recorded, but for what `agentrl.cassette.now()` returned.

A cassette is one JSON object with the fields of `Cassette`. `episode` has the fields of a line of
`episodes/step-NNNNNN.jsonl` in a run directory; its times are null.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from agentrl.cassette.tape import TapedAnswer
from agentrl.errors import ConfigError

CASSETTE_VERSION: Final = 1


class Cassette(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded episode."""

    format: Literal["agentrl.cassette"] = "agentrl.cassette"
    """Always `agentrl.cassette`."""
    version: int = CASSETTE_VERSION
    """Of the format."""
    workflow: str
    """The workflow that was recorded, `module:Name`."""
    workflow_args: dict[str, Any]
    """Its arguments."""
    answers: list[TapedAnswer]
    """What tools, environments, graders, judges, worker processes and the clock answered, in order."""
    episode: msgspec.Raw
    """The task, the model calls and the rewards."""


def write_cassette(path: Path, cassette: Cassette) -> None:
    """Write a cassette, in place of an earlier one.

    Raises:
        OSError: it cannot be written; no partial file is left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(cassette) + b"\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_cassette(path: Path) -> Cassette:
    """Return the cassette in a file.

    Raises:
        ConfigError: the file cannot be read, or is no cassette of this version.
    """
    try:
        cassette = msgspec.json.decode(path.read_bytes(), type=Cassette)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this cassette: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no cassette: {error}; `agentrl record` writes one") from error
    if cassette.version != CASSETTE_VERSION:
        raise ConfigError(
            f"{path}: expected a cassette of version {CASSETTE_VERSION}, got version {cassette.version}; record it again"
        )
    return cassette
