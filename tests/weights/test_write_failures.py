"""A failed write of weights names its cause and the fix that helps."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from agentrl.errors import TrainError
from agentrl.weights.disk import atomic_directory


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "free space"),
        (errno.EACCES, "fix the cause"),
        (errno.EROFS, "fix the cause"),
    ],
)
def test_a_full_disk_and_other_causes_get_different_advice(tmp_path: Path, number: int, fix: str) -> None:
    final = tmp_path / "model"
    with pytest.raises(TrainError) as error, atomic_directory(final):
        raise OSError(number, os.strerror(number))
    assert str(error.value) == f"cannot write {final}: {os.strerror(number)}; {fix}, or write elsewhere"
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_the_cause_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(TrainError, match=r"file/model: Not a directory; fix the cause, or write elsewhere")
    with refused, atomic_directory(tmp_path / "file" / "model"):
        raise AssertionError
