"""The mark `starts` is true both ways: the guard of `tests/support/process_guard.py` holds tests to it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]
TESTS = """
import subprocess
import pytest

def start():
    subprocess.run(["true"], check=True)

@pytest.fixture(scope="module")
def started():
    start()

@pytest.fixture(scope="session")
def starts_at_its_end():
    yield
    start()

def test_starts_without_the_mark():
    start()

def test_hides_a_start_without_the_mark():
    try:
        start()
    except BaseException:
        pass

def test_uses_without_the_mark_what_starts(started):
    pass

@pytest.mark.starts
def test_starts():
    start()

@pytest.mark.starts
def test_first_that_uses_what_starts(started):
    pass

@pytest.mark.starts
def test_second_that_uses_what_starts(started, starts_at_its_end):
    pass

@pytest.mark.starts
@pytest.mark.parametrize("really", [True, False])
def test_starts_in_one_case(really):
    if really:
        start()

@pytest.mark.starts
def test_starts_nothing():
    pass

def test_starts_nothing_and_says_so():
    pass
"""
REFUSED = {"test_starts_without_the_mark", "test_hides_a_start_without_the_mark", "test_uses_without_the_mark_what_starts"}


def failures(folder: Path, *flags: str) -> set[str]:
    """Return the tests that fail, or whose fixtures do."""
    (folder / "test_them.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = starts\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.process_guard", "-p", "no:cacheprovider", "-rfE"]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", str(folder / "test_them.py"), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = set(re.findall(r"^(?:FAILED|ERROR) \S*::(\w+)", done.stdout, re.MULTILINE))
    assert found, done.stdout + done.stderr
    return found


def test_a_test_without_the_mark_may_start_nothing(tmp_path: Path) -> None:
    users = {"test_first_that_uses_what_starts", "test_second_that_uses_what_starts"}  # of the fixture that was refused
    assert failures(tmp_path) - users == REFUSED


def test_a_mark_without_a_need_is_found_where_nothing_is_started(tmp_path: Path) -> None:
    assert failures(tmp_path, "--refuse-starts") == {*REFUSED, "test_starts_nothing"}
