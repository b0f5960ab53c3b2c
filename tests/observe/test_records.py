"""Records on disk: whole lines, in order, also when the run ends badly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agentrl.episode.codec import encode_line
from agentrl.errors import RunStopped
from agentrl.observe.records import JsonLines
from agentrl.types import StopReason


def test_arrays_become_lists_and_what_is_not_finite_becomes_null() -> None:
    line = encode_line(
        {"ids": np.array([1, 2], np.int32), "loss": float("nan"), "reason": StopReason.STOP, "where": Path("x")}
    )
    assert json.loads(line) == {"ids": [1, 2], "loss": None, "reason": "stop", "where": "PosixPath('x')"}


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_deleted_or_replaced_is_noticed(tmp_path: Path, replaced: bool) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"number": 1})
    lines.check_in_place()
    lines.path.unlink()
    if replaced:
        lines.path.write_text("")
    with pytest.raises(RunStopped, match="was replaced by another file" if replaced else "was deleted"):
        lines.check_in_place()
    lines.close()


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    for number in (1, 2):
        lines = JsonLines(tmp_path / "new" / "metrics.jsonl")
        lines.append({"number": number})
        lines.close()
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == '{"number":1}\n{"number":2}\n'


@pytest.mark.parametrize("tail", [b"", b'{"event": "st', b'{"long": "' + b"x" * 200_000])
def test_half_a_line_left_by_a_killed_process_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n":1}\n' + tail)
    lines = JsonLines(path)
    lines.append({"n": 2})
    lines.close()
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n'


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunStopped, match=r"cannot write .*file/metrics\.jsonl: Not a directory"):
        JsonLines(tmp_path / "file" / "metrics.jsonl")


def test_what_json_does_not_have_is_written_as_text() -> None:
    deep: list[object] = []
    for _ in range(1000):
        deep = [deep]
    line = encode_line({"half": "\ud800", "huge": 2**70, "deep": deep, "ids": np.array([1], np.int32), 7: [True, 1.5]})  # pyright: ignore[reportArgumentType]
    read = json.loads(line)
    assert (read["half"], read["huge"], read["ids"], read["7"]) == ("\\ud800", str(2**70), [1], [True, 1.5])
    assert read["deep"]


def test_a_header_is_written_once(tmp_path: Path) -> None:
    for number in (1, 2):
        lines = JsonLines(tmp_path / "lines.jsonl", header={"version": 1})
        lines.append({"number": number})
        lines.close()
    assert (tmp_path / "lines.jsonl").read_text() == '{"version":1}\n{"number":1}\n{"number":2}\n'
