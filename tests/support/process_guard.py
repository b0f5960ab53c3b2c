"""The mark `starts`: the guard of the tests that lack it, and the search for those that have it without a need.

Invariant: a test without the mark starts no process (a fork that ends at once, as of the trial of a chat template, aside),
and a test function with it has a case that starts one or uses a fixture that does. The guard watches every run for the
first half. With `--refuse-starts` nothing is started at all, and a function with the mark fails if nothing was refused.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
AUDITED = frozenset({"subprocess.Popen", "os.forkpty", "os.posix_spawn", "os.system"})
"""Audit events of Python that precede the start of a process."""
TARGETS = ("external", "frameworks", "clients", "sglang", "ray", "chaos", "gpu")
"""Marks of tests that need more than this machine's Python, which no target runs for starting nothing."""


class StartRefused(pytest.fail.Exception):
    """A test started a process that it may not start."""


class ProcessGuard:
    """Refuses to start a process in a test that lacks the mark `starts`, in its fixtures and threads too."""

    def __init__(self) -> None:
        self.refuses_all = False
        """Whether tests with the mark start nothing either."""
        self._is_on = False
        self._has_mark = False
        self._refused: list[str] = []
        self._has_needed: dict[tuple[Path, str], bool] = {}
        """Whether a case of a test function with the mark was refused a start; the cases of one come one after another."""
        sys.addaudithook(self._see)

    def begin(self, item: pytest.Item) -> None:
        """Watch the test that begins, unless it has the mark."""
        self._has_mark = any(item.get_closest_marker(name) for name in ("starts", *TARGETS))
        self._is_on, self._refused = self.refuses_all or not self._has_mark, []

    def end(self) -> None:
        """Watch no more."""
        self._is_on = False

    def check(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Fail a test where a thread or a handler of errors hid the refusal, and the last case of a mark without a need."""
        refused, self._refused = self._refused, []
        if refused and not self._has_mark:
            raise StartRefused(self._message(refused))
        if not self.refuses_all or item.get_closest_marker("starts") is None:
            return
        function = _function(item)
        self._has_needed[function] = self._has_needed.get(function, False) or bool(refused)
        if (nextitem is None or _function(nextitem) != function) and not self._has_needed[function]:
            pytest.fail(f"{function[1]} has the mark `starts`, and none of its cases starts a process: take the mark away")

    def see_end(self, item: pytest.Item, report: pytest.TestReport, error: BaseException | None) -> None:
        """Note that a part of a test has ended; where all starts are refused, that of one with the mark is expected."""
        if not self.refuses_all or not self._has_mark:
            return
        if _is_refusal(error):  # a shared fixture raises to each of its tests what it raised to the first
            self._refused.append(str(error))
        if report.failed and self._refused:
            report.outcome, report.wasxfail = "skipped", "the start of a process was refused"

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event in AUDITED:
            self._refused.append(f"{event} {arguments[:2]}")
            raise StartRefused(self._message(self._refused))

    def _message(self, refused: list[str]) -> str:
        return f"a test without the mark `starts` starts a process: {refused}; give it the mark (CONTRIBUTING.md)"


GUARD = ProcessGuard()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that searches for marks without a need."""
    parser.addoption("--refuse-starts", action="store_true", help="start no process; fail marks `starts` without a need")


def pytest_configure(config: pytest.Config) -> None:
    """Read the option."""
    GUARD.refuses_all = bool(config.getoption("--refuse-starts"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Guard the test with its fixtures, those of its module and session included."""
    GUARD.begin(item)
    try:
        return (yield)
    finally:
        GUARD.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell the guard how a part of the test ended."""
    report = yield
    GUARD.see_end(item, report, call.excinfo.value if call.excinfo else None)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Fail a test that hid the start of a process; those that the last test starts end what the session has."""
    if nextitem is None:
        GUARD.end()
    result = yield
    GUARD.check(item, nextitem)
    return result


def _function(item: pytest.Item) -> tuple[Path, str]:
    return item.path, str(getattr(item, "originalname", item.name))


def _is_refusal(error: BaseException | None) -> bool:
    """Return whether an error is a refusal, came from one, or holds one."""
    if error is None or isinstance(error, StartRefused):
        return error is not None
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return _is_refusal(error.__cause__ or error.__context__) or any(map(_is_refusal, inner))
