"""The mark `processes`: which tests have it, and the guard of those that do not.

Invariant: a test of `make test-fast` starts no process (a fork that ends at once, as of the trial of a chat template,
aside). A module gets the mark by the names that it, the support that it imports or the `conftest.py` of its folders uses;
this may be too wide, and the guard fails a test where it is too narrow: give that one `@pytest.mark.processes`.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
STARTERS = re.compile(r"subprocess|Popen|open_process|[Ll]auncher|launch_|train_run|[Ss]andbox|program|processes|workers")
"""Names by which tests start processes."""
AUDITED = frozenset({"subprocess.Popen", "os.forkpty", "os.posix_spawn", "os.system"})
"""Audit events of Python that precede the start of a process."""
_IMPORT = re.compile(r"^from (tests[\w.]*) import ([^\n(]+|\([^)]*\))", re.MULTILINE)


def starts_processes(module: Path) -> bool:
    """Return whether a file of the tests, or what it uses of them, names something that starts a process."""
    seen: set[Path] = set()
    waiting = [module]
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        names, used = _read(file)
        if names:
            return True
        waiting += used
    return False


@cache
def _read(file: Path) -> tuple[bool, list[Path]]:
    """Return whether the text of a file names a starter, and the files of the tests that it uses."""
    text = file.read_text()
    modules = [f"{base}.{name}" for base, names in _IMPORT.findall(text) for name in re.findall(r"\w+", names)]
    modules += [base for base, _ in _IMPORT.findall(text)]
    paths = [TESTS.parent.joinpath(*module.split(".")).with_suffix(".py") for module in modules]
    paths += [folder / "conftest.py" for folder in file.parents if TESTS in folder.parents]
    return STARTERS.search(text) is not None, [path for path in paths if path.exists()]


class ProcessGuard:
    """Refuses to start a process in a test that lacks the mark `processes`, in its fixtures and threads too."""

    def __init__(self) -> None:
        self._is_on = False
        self._refused: list[str] = []
        sys.addaudithook(self._see)

    def begin(self, item: pytest.Item) -> None:
        """Watch the test that begins, unless it has the mark."""
        self._is_on, self._refused = item.get_closest_marker("processes") is None, []

    def end(self) -> None:
        """Watch no more."""
        self._is_on = False

    def check(self) -> None:
        """Fail the test also where a thread or a handler of errors hid the refusal."""
        refused, self._refused = self._refused, []
        if refused:
            raise pytest.fail.Exception(self._message(refused))

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event in AUDITED:
            self._refused.append(f"{event} {arguments[:2]}")
            raise pytest.fail.Exception(self._message(self._refused))

    def _message(self, refused: list[str]) -> str:
        return f"a test without the mark `processes` starts a process: {refused}; give it the mark (CONTRIBUTING.md)"
