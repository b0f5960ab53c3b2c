"""`agentrl sft`: what cannot be taught, or not be written, is named before the training starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.commands.models.sft import encode_conversations, warm_start
from agentrl.config import RunConfig, parse_config
from agentrl.errors import ConfigError
from agentrl.tokens.renderer import Renderer

USER = {"role": "user", "content": "Say 1."}
ASSISTANT = {"role": "assistant", "content": "1"}


def write(path: Path, *conversations: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return path


def make_run(checkpoint: Path, data: Path) -> RunConfig:
    sft = {"data": str(data), "steps": 1, "device": "cpu", "threads": 1}
    return parse_config({"workflow": "my:Agent", "tasks": {"path": "t"}, "model": {"path": str(checkpoint)}, "sft": sft})


def test_a_conversation_without_the_assistant_is_named_by_file_and_line(tmp_path: Path, checkpoint: Path) -> None:
    data = write(tmp_path / "data.jsonl", [USER, ASSISTANT], [USER], [USER, ASSISTANT])
    with pytest.raises(ConfigError, match=r"data\.jsonl:2: expected an assistant message"):
        encode_conversations(data, Renderer.load(checkpoint))


def test_conversations_with_the_assistant_are_taken(tmp_path: Path, checkpoint: Path) -> None:
    data = write(tmp_path / "data.jsonl", [USER, ASSISTANT], [USER, ASSISTANT, USER])
    assert all(example.loss_mask.any() for example in encode_conversations(data, Renderer.load(checkpoint)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("/proc/student", "/proc/student: cannot write in /proc: "), ("data.jsonl/student", "cannot write in .*: Not a dir")],
)
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, name: str, expected: str
) -> None:
    data = write(tmp_path / "data.jsonl")
    with pytest.raises(ConfigError, match=expected):
        warm_start(make_run(tmp_path / "no-such-model", data), tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["data.jsonl"]


def test_directories_above_the_output_are_made_and_a_pipe_gets_lines(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data.jsonl", [USER, ASSISTANT])
    warm_start(make_run(checkpoint, data), tmp_path / "a" / "b" / "student")
    assert "warm start: step 1/1, loss " in capsys.readouterr().err
    assert (tmp_path / "a" / "b" / "student" / "model.safetensors").exists()
