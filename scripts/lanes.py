"""Which tests a change needs: those of the packages that it touches, and of the packages that import them.

    python -m scripts.lanes              # the packages that the commits since the main branch touch, or "everything"
    python -m scripts.lanes agentrl      # the folders of the core's tests; of a companion, those of its lane

`$AGENTRL_BASE` names the commit to compare with, by default `origin/main` or `main`.

Invariant: a file that belongs to no companion alone needs everything, but for documents and the tests of the core.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

from scripts.rooms import PACKAGES, ROOT, TESTS, rooms

CORE = "agentrl"
COMPANIONS = tuple(package for package in PACKAGES if package != CORE)
ELSEWHERE = ("chaos", "clients", "frameworks", "gpu", "support")
"""Folders of tests that targets of their own run, and of what tests share."""
EXTRA = {
    "agentrl_doors": ("tests/clients/",),
    "agentrl_workflows": ("examples/", "tests/frameworks/"),
}
"""Where files of a package stand beside its folder and its tests."""
CORE_TESTS_ONLY = (
    "docs/",
    "docker/",
    "benchmarks/",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "mkdocs.yml",
)
"""What only the tests of the core read: `tests/contract` does."""


def paths_of(package: str) -> list[str]:
    """Return the folders and files of a package's tests; the core has all that no companion has."""
    tests = ROOT / "tests"
    if package != CORE:
        return [f"tests/{name}" for name in _own_tests(package) if name not in ELSEWHERE]
    companions = {name for companion in COMPANIONS for name in _own_tests(companion)}
    names = sorted(path.name for path in tests.iterdir() if path.is_dir() or path.match("test_*.py"))
    mine = [name for name in names if name not in companions and name not in ELSEWHERE and not name.startswith("__")]
    return [CORE, *(f"tests/{name}" for name in mine)]


def touched(files: Iterable[str]) -> list[str] | None:
    """Return the companions whose lanes a change of these files needs; None if it needs everything."""
    found: set[str] = set()
    for file in files:
        package = next((name for name in COMPANIONS if file.startswith(_places(name))), None)
        if package is not None:
            found.add(package)
        elif not file.startswith((*CORE_TESTS_ONLY, *(f"{path}/" for path in paths_of(CORE) if path != CORE))):
            return None
    return [name for name in COMPANIONS if name in found or found & _imported(name)]


def changed_files() -> list[str] | None:
    """Return the files that differ from where this branch left the main branch; None if that is not known."""
    named = os.environ.get("AGENTRL_BASE")
    for base in [named] if named else ["origin/main", "main"]:
        if (fork := _git("merge-base", "HEAD", base)) is None:
            continue
        differing = _git("diff", "--name-only", fork.strip())
        added = _git("ls-files", "--others", "--exclude-standard")
        return [*(differing or "").splitlines(), *(added or "").splitlines()] or None  # none: this is the main branch
    return None


def lanes() -> list[str] | None:
    """Return the companions whose lanes this checkout needs beside the core's tests; None if it needs everything."""
    files = changed_files()
    return None if files is None else touched(files)


def _own_tests(package: str) -> list[str]:
    """Return the names of the tests of a companion that are not those of a room of the core too."""
    core = {path.name for path in (ROOT / PACKAGES[CORE]).iterdir()}
    return [name for name in TESTS[package] if name not in core]


def _places(package: str) -> tuple[str, ...]:
    tests = tuple(path if path.endswith(".py") else f"{path}/" for path in paths_of(package))
    return (f"{PACKAGES[package]}/", *tests, *EXTRA.get(package, ()))


@cache
def _imported(package: str) -> frozenset[str]:
    """Return the companions that a package imports, and those that they import."""
    [room] = rooms(package)
    direct = set(room.stands_on.split(", ")) & set(COMPANIONS)
    return frozenset(direct.union(*(_imported(name) for name in direct)))


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    if sys.argv[1:]:
        print("\n".join(path for package in sys.argv[1:] for path in paths_of(package)))
    else:
        needed = lanes()
        print("everything" if needed is None else "\n".join([CORE, *needed]))
