"""Write `docs/rooms.md`, the map of the packages, from their docstrings, their layers and their imports.

    python -m scripts.rooms

Invariant: the page has a row for every room, and its sizes are those of the files when it was written.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rooms.md"
PACKAGES = {
    "agentrl": "agentrl",
    "agentrl_doors": "companions/agentrl_doors",
    "agentrl_envs": "envs/agentrl_envs",
    "agentrl_gguf": "companions/agentrl_gguf",
    "agentrl_rewards": "envs/agentrl_rewards",
    "agentrl_sandbox": "envs/agentrl_sandbox",
    "agentrl_simulate": "companions/agentrl_simulate",
    "agentrl_testing": "companions/agentrl_testing",
    "agentrl_viewer": "companions/agentrl_viewer",
    "agentrl_workflows": "workflows/agentrl_workflows",
}
"""Folders of the import packages."""
TESTS = {
    "agentrl.client": ("client", "tools"),
    "agentrl.observe": ("observe", "runs"),
    "agentrl.processes": ("processes", "watchdog"),
    "agentrl.support": ("test_concurrency.py", "test_folders.py", "test_foreign.py"),
    "agentrl_doors": ("gateway", "online", "clients"),
    "agentrl_envs": ("envs",),
    "agentrl_gguf": ("gguf",),
    "agentrl_rewards": ("reward",),
    "agentrl_sandbox": ("sandbox",),
    "agentrl_simulate": ("simulate", "cluster", "plan"),
    "agentrl_testing": ("test_testing.py", "commands"),
    "agentrl_viewer": ("view", "exchange"),
    "agentrl_workflows": ("workflows", "test_examples.py"),
}
"""Tests of rooms whose folder of tests has another name."""
_HEAD = """\
# The rooms

`agentrl` is the core: all that a run with its defaults needs. The other packages are companions. They import the core
and each other as drawn, join it by entry points, and are imported when a run asks for them
([ADR 44](adr/0044-core-and-companions.md)). A room imports only rooms of lower layers; `make check` tests that.

This page is made from the code by `python -m scripts.rooms`.
"""


@dataclass(frozen=True, slots=True)
class Room:
    """A package, or a file at the top of the core."""

    name: str
    purpose: str
    files: int
    lines: int
    tests: str
    stands_on: str


def rooms(package: str) -> Iterator[Room]:
    """Yield the rooms of the core, or the one room that a companion is."""
    folder = ROOT / PACKAGES[package]
    if package != "agentrl":
        yield _room(package, folder)
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "__init__.py").is_file():
            yield _room(f"agentrl.{path.name}", path)
        elif path.suffix == ".py" and not path.stem.startswith("__"):
            yield _room(f"agentrl.{path.stem}", path)


def layers() -> list[str]:
    """Return the layers of the core, the highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(contract["layers"] for contract in contracts if contract.get("containers") == ["agentrl"])


def page() -> str:
    """Return the page as Markdown."""
    core = list(rooms("agentrl"))
    order = {name.split(".")[0]: place for place, layer in enumerate(layers()) for name in layer.replace(" ", "").split("|")}
    core.sort(key=lambda room: (order[room.name.removeprefix("agentrl.")], room.name))
    companions = [room for package in PACKAGES if package != "agentrl" for room in rooms(package)]
    sizes = f"{len(core)} rooms, {_rounded(sum(room.lines for room in core)):,} lines"
    others = f"{len(companions)} packages, {_rounded(sum(room.lines for room in companions)):,} lines"
    return "\n".join(
        [_HEAD, f"## The core: {sizes}, the highest first\n", _table(core), f"## Companions: {others}\n", _table(companions)]
    )


def _room(name: str, path: Path) -> Room:
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    first = path / "__init__.py" if path.is_dir() else path
    summary = (ast.get_docstring(ast.parse(first.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    lines = sum(file.read_text().count("\n") for file in files)
    return Room(name, summary, len(files), lines, _tests(name), ", ".join(_imports(name, files)))


def _tests(name: str) -> str:
    own = name.removeprefix("agentrl.")
    places = TESTS.get(name, (own, f"test_{own}.py"))
    return ", ".join(f"tests/{place}" for place in places if (ROOT / "tests" / place).exists())


def _imports(name: str, files: Sequence[Path]) -> list[str]:
    """Return the rooms that the files of a room import, at their top or inside functions."""
    found: set[str] = set()
    for file in files:
        for module in re.findall(r"^\s*(?:from|import) (agentrl[\w.]*)", file.read_text(), re.MULTILINE):
            room = ".".join(module.split(".")[:2]) if module.startswith("agentrl.") else module.split(".")[0]
            found.add(room)
    own = name if name.startswith("agentrl.") else name.split(".")[0]
    short = {room.removeprefix("agentrl.") if name.startswith("agentrl.") else room for room in found - {own, "agentrl"}}
    if not name.startswith("agentrl."):
        short = {room.split(".")[0] for room in short}
    return sorted(short)


def _rounded(lines: int) -> int:
    return round(lines, -2)


def _table(found: Sequence[Room]) -> str:
    rows = [
        f"| `{room.name}` | {room.purpose} | {room.stands_on} | {room.tests} | {room.files} | {room.lines:,} |"
        for room in found
    ]
    return "\n".join(["| room | what for | imports | tests | files | lines |", "|---|---|---|---|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
