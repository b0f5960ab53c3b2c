"""Which files of a project are tests, and how the right ones are put back; it stands in each task's `tests/check.py`.

It needs nothing but Python's standard library, in any container, and nothing else may run meanwhile.
"""

import os
import shutil
import stat
from fnmatch import fnmatchcase

TESTS = (
    *("test/*", "tests/*", "testing/*", "*/test/*", "*/tests/*", "*/testing/*"),
    *("test_*.py", "*/test_*.py", "*_test.py", "conftest.py", "*/conftest.py"),
)
"""Patterns of the paths of tests; a star stands for slashes, too."""
SETTINGS = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
"""Files at the top that tell a test runner what to do."""


def fits(path: str, patterns: "tuple[str, ...] | list[str]") -> bool:
    """Return whether a path fits one of the patterns."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def put_back(root: str, files: "dict[str, bytes]", patterns: "tuple[str, ...] | list[str]") -> None:
    """Remove every test and setting below `root`, and write `files` instead; no link is followed."""
    for folder, folders, names in os.walk(root, topdown=True):
        here = os.path.relpath(folder, root)
        for name in [*folders, *names]:
            place = os.path.join(folder, name)
            path = name if here == "." else here + "/" + name
            if os.path.islink(place):
                is_test = fits(path, patterns) or fits(path + "/x", patterns) or path in SETTINGS
            else:
                is_test = name in names and (fits(path, patterns) or path in SETTINGS)
            if is_test:
                os.unlink(place)
    for path, data in files.items():
        _write_below(root, path, data)


def _write_below(root: str, path: str, data: bytes) -> None:
    *folders, name = path.split("/")
    place = root
    for folder in folders:
        place = os.path.join(place, folder)
        if not _is(place, stat.S_ISDIR):
            _clear_place(place)
            os.mkdir(place)
    place = os.path.join(place, name)
    _clear_place(place)
    with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
        file.write(data)


def _is(place: str, kind: "object") -> bool:
    try:
        return bool(kind(os.lstat(place).st_mode))  # type: ignore[operator]
    except OSError:
        return False


def _clear_place(place: str) -> None:
    if _is(place, stat.S_ISDIR):
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)
