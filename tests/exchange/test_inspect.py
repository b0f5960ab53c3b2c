"""Logs of Inspect are opened as runs: samples are episodes, their scores rewards, their errors failures."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from agentrl.commands.open_run import Run
from agentrl.errors import ConfigError
from agentrl_viewer.commands.view import opened
from agentrl_viewer.exchange.foreign_run import is_foreign

CALL = {"id": "c1", "function": "bash", "arguments": {"cmd": "attachment://a1"}, "type": "function"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You work in a shell."},
    {"role": "assistant", "content": "An example.", "source": "input"},
    {"role": "user", "content": "List it.", "source": "input"},
    {
        "role": "assistant",
        "source": "generate",
        "content": [{"type": "reasoning", "reasoning": "ls."}, {"type": "text", "text": "I look."}],
        "tool_calls": [CALL],
    },
    {
        "role": "tool",
        "content": "",
        "tool_call_id": "c1",
        "function": "bash",
        "error": {"type": "timeout", "message": "late"},
    },
    {"role": "assistant", "content": "Nothing.", "source": "generate"},
    {"role": "user", "content": "Goodbye."},
]
SAMPLE: dict[str, Any] = {
    "id": "s1",
    "epoch": 1,
    "input": "List it.",
    "target": "x",
    "messages": MESSAGES,
    "scores": {"match": {"value": "C"}, "steps": {"value": 2}},
    "attachments": {"a1": "ls -la"},
    "total_time": 3.5,
}
BROKEN = {**SAMPLE, "id": 2, "scores": None, "error": {"message": "no container", "traceback": "T"}}
LOG: dict[str, Any] = {"version": 2, "status": "success", "eval": {"task": "shell", "model": "some/model"}, "plan": {}}


def check(source: Path) -> None:
    assert is_foreign(source)
    with opened(source) as shown:
        rows = {row.episode_id: row for row in Run(shown.path).episodes()}
        assert rows.keys() == {"shell.s1.1", "shell.2.1"}
        assert (rows["shell.s1.1"].episode_return, rows["shell.s1.1"].success) == (1.0, True)
        assert (rows["shell.2.1"].failure, rows["shell.2.1"].success) == ("InspectError", None)
        trajectory = Run(shown.path).episode("shell.s1.1").trajectory
        assert trajectory.metrics == {"match": 1.0, "steps": 2.0}
        assert [len(turn.messages) for turn in trajectory.turns] == [3, 1]
        function = {"name": "bash", "arguments": '{"cmd": "ls -la"}'}
        assert trajectory.turns[0].message == {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "ls.",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        }
        assert trajectory.turns[1].messages == ({"role": "tool", "tool_call_id": "c1", "content": "Error: late"},)
        turns = shown.episode_fields("shell.s1.1")["turns"]
        assert turns[1]["closing"] == [{"role": "user", "content": "Goodbye."}]


def test_a_log_in_json_and_an_archive_show_the_same_episodes(tmp_path: Path) -> None:
    file = tmp_path / "json" / "log.json"
    file.parent.mkdir()
    file.write_text(json.dumps({**LOG, "samples": [SAMPLE, BROKEN]}))
    check(file)
    check(file.parent)
    archive = tmp_path / "log.eval"
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr("header.json", json.dumps(LOG))
        for sample in (SAMPLE, BROKEN):
            written.writestr(f"samples/{sample['id']}_epoch_1.json", json.dumps(sample))
    check(archive)


def test_a_log_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.eval").write_bytes(b"PK")
    (tmp_path / "b.json").write_text(json.dumps({**LOG, "samples": [{"id": 1}]}))
    for name in ("a.eval", "b.json"):
        with pytest.raises(ConfigError, match=f"{name} is no finished log of Inspect"), opened(tmp_path / name):
            pass
