"""`agentrl chat`: streamed answers, tool calls that run, commands, and text that cannot steer the terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.commands.chat import MAX_ROUNDS, ChatOptions, chat
from agentrl.errors import ConfigError
from agentrl.servers.scripted.script import Script, ScriptedCall, ScriptedReply
from tests.support.cli import AGENTRL, END_S, started
from tests.support.gateway import MODEL, script_engine, served

CALL = '<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"\x1b[31m{a + b}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def talk(
    checkpoint: Path, script: Script, *lines: str, model: str = MODEL, system: str | None = None, tools: Sequence[str] = ()
) -> tuple[str, list[int]]:
    """Return what a chat at an endpoint shows, and the number of answers in each request's context."""
    turns: list[int] = []

    def counted(call: ScriptedCall) -> ScriptedReply | str | Sequence[int]:
        turns.append(call.turn)
        return script(call)

    waiting, shown = [f"{line}\n" for line in lines], io.StringIO()
    console = Console(file=shown, soft_wrap=True, markup=False, highlight=False)
    async with served(script_engine(checkpoint, counted), checkpoint) as server:
        chosen = ChatOptions(endpoint=f"{server.url}/v1", model=model, system=system, tools=tools)
        await chat(chosen, read=lambda: waiting.pop(0) if waiting else "", console=console)
    return shown.getvalue(), turns


async def test_a_tool_call_is_shown_and_run_and_the_model_continues_with_its_reply(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    shown, _ = await talk(
        checkpoint,
        lambda call: CALL if call.index == 0 else "It is 5.",
        "2 + 3?",
        f"/save {file}",
        system="Be brief.",
        tools=(f"{__name__}:add",),
    )
    assert 'I add.\nadd({"a": 2, "b": 3})\n-> \\x1b[31m5\nIt is 5.\n' in shown
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert saved["tools"][0]["function"]["name"] == "add"
    assert "\x1b" not in shown


async def test_a_conversation_grows_until_it_is_reset_and_unknown_commands_are_named(checkpoint: Path) -> None:
    shown, turns = await talk(
        checkpoint,
        lambda _: "\x1b]0;title\x07yes :smile:",
        "one",
        "",
        "two",
        "/reset",
        "three",
        "/nonsense",
        "/save",
        "/save /no/x",
        "/save .",
    )
    assert shown.count("\\x1b]0;title\\x07yes :smile:") == 3
    assert turns[0] == turns[2] < turns[1]
    assert "there is no /nonsense; /reset starts again" in shown
    assert "/save needs the name of a file" in shown
    assert "cannot write /no/x: No such file or directory" in shown
    assert "cannot write .: " in shown


async def test_a_question_without_an_answer_is_forgotten(checkpoint: Path) -> None:
    shown, turns = await talk(checkpoint, lambda _: "fine", "long " * 9000, "short")
    assert "no answer: " in shown
    assert "leaves no room for output" in shown
    assert "fine" in shown
    assert len(turns) == 1


async def test_an_unknown_model_is_answered_with_what_the_endpoint_offers(checkpoint: Path) -> None:
    shown, _ = await talk(checkpoint, lambda _: "x", "hi", model="gpt")
    assert f"the endpoint has no model 'gpt'; it offers {MODEL}: name one of them" in shown


async def test_calls_without_end_are_cut(checkpoint: Path) -> None:
    shown, turns = await talk(checkpoint, lambda _: CALL, "2 + 3?", tools=(f"{__name__}:add",))
    assert len(turns) == MAX_ROUNDS
    assert f"{MAX_ROUNDS} answers in a row called tools" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected a checkpoint, or --endpoint"),
        ({"endpoint": "http://127.0.0.1:9/v1"}, "--endpoint needs --model"),
        ({"endpoint": "http://u:p@127.0.0.1:9/v1", "model": "m"}, "a user or a password"),
        ({"endpoint": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"checkpoint": Path("x"), "tools": ("os:sep",)}, "expected a function with typed parameters"),
        ({"checkpoint": Path("x"), "max_tokens": 0}, "--max-tokens: expected at least 1"),
    ],
)
async def test_what_cannot_be_talked_with_is_an_error_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await chat(ChatOptions(**options), read=lambda: "")


async def test_a_checkpoint_is_served_in_the_type_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    def refuse(_path: Path, *, inference: object, sampling: object) -> None:
        raise ConfigError(f"{inference}, {sampling}")

    monkeypatch.setattr("agentrl.commands.chat.serve", refuse)
    with pytest.raises(ConfigError, match="'device': 'cpu', 'dtype': 'bfloat16'"):
        await chat(ChatOptions(checkpoint=checkpoint, device="cpu", dtype="bfloat16"), read=lambda: "")


@pytest.mark.starts
def test_the_command_answers_the_lines_of_its_input_from_a_checkpoint(tmp_path: Path, checkpoint: Path) -> None:
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--max-tokens", "5", "--temperature", "0")
    command = (AGENTRL, "chat", str(checkpoint), *flags)
    with started(tmp_path, "bash", "-c", f"printf 'Hi\\n/save a.json\\n' | {' '.join(command)}") as process:
        shown, errors = process.communicate(timeout=END_S)
    assert process.returncode == 0, errors
    [_, answer] = json.loads((tmp_path / "a.json").read_text())["messages"]
    assert answer["content"] != ""
    assert answer["content"].split()[0] in shown
