"""The steps of a task's Dockerfile, carried out over a workbench in their order.

Consecutive COPYs are one layer, and the RUNs after them another one. Files go where the links and directories of the image
lead, as they are when their turn comes; a program in the sandbox says so, and nothing of it is written anywhere else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.containers import Container, LayerFile
from agentrl_sandbox.harbor.recipe import CopiedFile, CopyStep, ImageRecipe, RunStep, Step
from agentrl_sandbox.types import FileContents
from agentrl_workflows.terminal.scripts import end_of_output

_ASKED: Final = 200
"""Paths that one command asks for."""
_LOOK_S: Final = 60.0
_LOOK: Final = """for t; do
  k=-; [ -d "$t" ] && k=d
  p=$t; while [ ! -d "$p" ]; do p=${p%/*}; p=${p:-/}; done
  printf '%s\\n%s\\n' "$k" "$p"; (cd -P "$p" && pwd -P)
done"""
"""Prints three lines for each path: `d` for a directory, the lowest directory on its way, and that without links."""
_RUN: Final = 'mkdir -p "$0" && cd "$0" && exec "$@"'


class StepGroup(NamedTuple):
    """Files that come first, and commands that follow."""

    copies: tuple[CopyStep, ...]
    runs: tuple[Step, ...]
    """Commands, and directories that are made between and after them."""


class FoundPlace(NamedTuple):
    """Where a path leads in an image."""

    path: str
    is_folder: bool


def groups_of(recipe: ImageRecipe) -> list[StepGroup]:
    """Return the steps of a recipe in groups; the last directory is the working directory."""
    groups: list[StepGroup] = []
    copies, runs = list[CopyStep](), list[Step]()
    for step in (*recipe.steps, CopyStep(said="WORKDIR", folders=(recipe.workdir,))):
        if isinstance(step, CopyStep) and (step.files or not runs):
            if runs:
                groups.append(StepGroup(tuple(copies), tuple(runs)))
                copies, runs = [], []
            copies.append(step)
        else:
            runs.append(step)
    return [*groups, StepGroup(tuple(copies), tuple(runs))]


def layer_keys(recipe: ImageRecipe, groups: Sequence[StepGroup]) -> list[str]:
    """Return a name for the layers of each group over those below: the same instructions and contents have the same."""
    digest = hashlib.sha256(repr(recipe.image).encode())
    keys: list[str] = []
    for group in groups:
        for step in (*group.copies, *group.runs):
            if isinstance(step, RunStep):
                parts = (step.argv, step.directory, sorted(step.environment.items()), step.folders)
            else:
                parts = (step.folders, [(file.target, file.inner, file.mode, _digest_of(file)) for file in step.files])
            digest.update(repr(parts).encode(errors="surrogateescape"))
        keys.append(digest.hexdigest())
    return keys


def _digest_of(file: CopiedFile) -> str:
    if file.source is None:
        return hashlib.sha256(file.text.encode()).hexdigest()
    found = file.source.stat()
    can_run = bool(found.st_mode & 0o111)
    return f"{_digest_of_path(file.source, found.st_size, found.st_mtime_ns, found.st_ino)}{can_run}"


@lru_cache(maxsize=4096)
def _digest_of_path(path: Path, size: int, changed_ns: int, number: int) -> str:
    """Return the digest of a file, which is read again when its size, its time or its number is another one."""
    del size, changed_ns, number
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def paths_to_look_up(copies: Sequence[CopyStep]) -> list[str]:
    """Return the paths of an image that decide where files go; none where nothing but directories is made."""
    if not any(step.files for step in copies):
        return []
    paths = {folder for step in copies for folder in step.folders}
    for file in (file for step in copies for file in step.files):
        paths.add(str(PurePosixPath(file.target).parent))
        if file.inner:
            paths.add(file.target)
    return sorted(paths)


async def look_up(container: Container, paths: Sequence[str]) -> dict[str, FoundPlace]:
    """Return where paths lead in a container.

    Raises:
        EnvironmentFault: it does not say so.
    """
    found: dict[str, FoundPlace] = {}
    for start in range(0, len(paths), _ASKED):
        asked = paths[start : start + _ASKED]
        result = await container.execute(["/bin/sh", "-c", _LOOK, "sh", *asked], timeout_s=_LOOK_S)
        lines = result.stdout.decode(errors="surrogateescape").split("\n")[:-1]
        if not result.is_success or len(lines) != 3 * len(asked):
            raise EnvironmentFault(f"the image does not say where {asked[0]} leads: {end_of_output(result)}")
        for path, kind, above, real in zip(asked, lines[::3], lines[1::3], lines[2::3], strict=True):
            if not real.startswith("/") or ".." in real.split("/") or not PurePosixPath(path).is_relative_to(above):
                raise EnvironmentFault(f"the image says that {path} leads to {real!r}; expected an absolute path")
            rest = PurePosixPath(path).relative_to(above)
            found[path] = FoundPlace(str(PurePosixPath(real) / rest), kind == "d")
    return found


def files_of(copies: Sequence[CopyStep], found: Mapping[str, FoundPlace]) -> dict[str, LayerFile]:
    """Return the files and directories of a layer by their places in the image."""
    files: dict[str, LayerFile] = {}
    for step in copies:
        for folder in step.folders:
            files[f"{_place(folder, found)}/".replace("//", "/")] = b""
        for file in step.files:
            target = PurePosixPath(file.target)
            if file.inner and file.target in found and found[file.target].is_folder:
                place = PurePosixPath(_place(file.target, found), file.inner)
            else:
                place = PurePosixPath(_place(str(target.parent), found), target.name)
            files[str(place)] = _contents(file)
    return {name: file for name, file in files.items() if name != "/"}


def _place(path: str, found: Mapping[str, FoundPlace]) -> str:
    return found[path].path if path in found else path


def _contents(file: CopiedFile) -> LayerFile:
    if file.source is None:
        return FileContents(file.text.encode(errors="surrogateescape"), can_run=False, mode=file.mode)
    if file.mode is None:
        return file.source
    return FileContents(file.source.read_bytes(), can_run=False, mode=file.mode)


async def run_steps(container: Container, steps: Sequence[Step], timeout_s: float) -> None:
    """Run commands and make directories in their order.

    Raises:
        EnvironmentFault: one fails; the message has its file and line.
    """
    for step in steps:
        if isinstance(step, CopyStep):
            argv, environment, text = ["/bin/mkdir", "-p", *step.folders], {}, " ".join(step.folders)
        else:
            if step.folders:
                await container.execute(["/bin/mkdir", "-p", *step.folders], timeout_s=timeout_s)
            argv, environment, text = ["/bin/sh", "-c", _RUN, step.directory, *step.argv], step.environment, step.text
        result = await container.execute(argv, environment=environment, timeout_s=timeout_s)
        if not result.is_success:
            raise EnvironmentFault(f"{step.said} {text}: {end_of_output(result)}")
