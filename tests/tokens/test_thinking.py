"""Templates that rewrite earlier turns: keep the sampled ids, or fork as the template says; either way it is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import ForkReason
from tests.tokens.dialogues import TOOL, assistant, system, user
from tests.tokens.play import Player

THOUGHT_CALL = '<think>\nuse the tool\n</think>\n\n<tool_call>\n{"name": "calc", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nit is three\n</think>\n\n3"


def reply(message: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}


def play(player: Player) -> list[dict[str, Any]]:
    """Two questions with reasoning; the first with a tool call."""
    messages: list[dict[str, Any]] = [user("x?")]
    messages.append(player.ask(messages, THOUGHT_CALL, [TOOL]))
    messages.append(reply(messages[-1]))
    messages.append(player.ask(messages, THOUGHT, [TOOL]))
    messages.append(user("y?"))
    messages.append(player.ask(messages, THOUGHT, [TOOL]))
    return messages


def test_reasoning_is_parsed_and_the_ids_keep_it(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("qwen3"))
    messages = play(player)
    assert messages[1]["reasoning_content"] == "use the tool"
    assert messages[1]["content"] is None
    assert messages[3] == {"role": "assistant", "content": "3", "reasoning_content": "it is three"}
    assert player.parents() == [None, 0, 1]
    assert not player.graph.forks
    assert player.kept() == [False, False, True]
    verify(player.trajectory())
    assert len(player.trajectory().branches()) == 1


def test_every_turn_above_which_reasoning_was_kept_says_so(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    player = Player(renderer)
    messages = play(player)
    for text in (THOUGHT_CALL, THOUGHT_CALL, THOUGHT):
        messages.append(player.ask(messages, text, [TOOL]))
        messages += [reply(messages[-1])] if text is THOUGHT_CALL else []
    kept = ["use the tool" in renderer.decode(ids, skip_special=False).split("y?")[0] for ids in player.sent]
    assert player.kept() == [False, False, True, True, True, True]
    assert kept == [False, True, True, True, True, True]  # the second turn is of the first question: its reasoning stays
    player.ask([user("z?")], THOUGHT)
    assert player.kept()[-1] is False


def test_as_template_forks_exactly_where_the_template_drops_reasoning(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("qwen3")
    player = Player(renderer, history="as_template")
    messages = play(player)
    assert player.parents() == [None, 0, None]
    assert player.forks() == [None, None, "thinking_stripped"]
    assert player.kept() == [False] * 3
    expected = renderer.render_text(renderer.plain(messages[:5]), [TOOL], generation_prompt=True)
    assert renderer.decode(player.sent[2], skip_special=False) == expected
    assert "use the tool" not in expected
    verify(player.trajectory())


@pytest.mark.parametrize("history", ["keep", "as_template"])
def test_a_turn_reward_reaches_the_turns_before_a_fork(
    history: Literal["keep", "as_template"], renderer_of: Callable[..., Renderer]
):
    player = Player(renderer_of("qwen3"), history=history)
    play(player)
    player.reward(2, 1.0)
    player.ask([user("A summary of it all. z?")], THOUGHT)
    player.reward(3, 2.0)
    trajectory = player.trajectory(final_reward=0.0)
    assert returns_to_go(trajectory, 1.0).tolist() == [3.0, 3.0, 3.0, 2.0]


def test_as_template_does_not_fork_without_reasoning(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("qwen3"), history="as_template")
    messages = [system("s"), user("1?")]
    for at in range(3):
        messages = [*messages, player.ask(messages, f"answer {at}"), user("next?")]
    assert player.parents() == [None, 0, 1]
    assert not player.graph.forks


def test_as_template_forks_from_the_deepest_turn_that_still_stands(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("qwen3"), history="as_template")
    messages = [user("1?")]
    for text in ("plain", THOUGHT, THOUGHT):
        messages = [*messages, player.ask(messages, text), user("next?")]
    assert player.parents() == [None, 0, 0]
    assert player.forks() == [None, None, "thinking_stripped"]
    assert "it is three" not in player.renderer.decode(player.sent[2], skip_special=False)
    verify(player.trajectory())


@pytest.mark.parametrize("history", ["keep", "as_template"])
def test_clients_may_drop_reasoning_or_send_it_back_inline(
    history: Literal["keep", "as_template"], renderer_of: Callable[..., Renderer]
):
    for spelling in (assistant("3"), assistant(THOUGHT), assistant("3", reasoning_content="it is three")):
        player = Player(renderer_of("qwen3"), history=history)
        player.ask([user("x?")], THOUGHT)
        player.ask([user("x?"), spelling, user("y?")], "ok")
        assert player.parents() == ([None, 0] if history == "keep" else [None, None])
        assert player.forks()[1] == (None if history == "keep" else "thinking_stripped")


def test_edited_reasoning_is_edited_history(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("qwen3"))
    player.ask([user("x?")], THOUGHT)
    player.ask([user("x?"), assistant("3", reasoning_content="it is four"), user("y?")], "ok")
    assert player.forks() == [None, "history_edited"]


def test_of_equal_answers_the_one_with_the_same_reasoning_is_extended(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("qwen3"))
    first = player.ask([user("x?")], THOUGHT)
    player.ask([user("x?")], THOUGHT.replace("three", "3"))
    player.ask([user("x?"), first, user("y?")], "ok")
    assert player.parents() == [None, None, 0]


def test_a_generation_prompt_that_opens_thinking_is_parsed_and_counted(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("deepseek_r1"))
    message = player.ask([user("x?")], "it is three\n</think>\n\n3")
    assert message == {"role": "assistant", "content": "3", "reasoning_content": "it is three"}
    player.ask([user("x?"), message, user("y?")], "so\n</think>\n\n4")
    assert player.parents() == [None, 0]
    assert player.kept() == [False, True]


def test_as_template_with_opened_thinking_forks_at_each_question(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("deepseek_r1"), history="as_template")
    message = player.ask([user("x?")], "it is three\n</think>\n\n3")
    player.ask([user("x?"), message, user("y?")], "so\n</think>\n\n4")
    assert player.forks() == [None, "thinking_stripped"]
    text = player.renderer.decode(player.sent[1], skip_special=False)
    assert text.endswith("<｜User｜>x?<｜Assistant｜>3<｜end▁of▁sentence｜><｜User｜>y?<｜Assistant｜><think>\n")


def test_thinking_turned_off_is_kept_or_forked(renderer_of: Callable[..., Renderer]):
    cases: list[tuple[Literal["keep", "as_template"], list[int | None]]] = [
        ("keep", [None, 0]),
        ("as_template", [None, None]),
    ]
    for history, parents in cases:
        player = Player(renderer_of("qwen3", enable_thinking=False), history=history)
        message = player.ask([user("x?")], "3")
        assert message["content"] == "3"
        player.ask([user("x?"), message, user("y?")], "4")
        assert player.parents() == parents


def test_a_template_that_moves_its_tools_is_kept_or_forked(renderer_of: Callable[..., Renderer]):
    renderer = renderer_of("mistral")
    cases: list[tuple[Literal["keep", "as_template"], list[str | None]]] = [
        ("keep", [None] * 3),
        ("as_template", [None, None, "template_changed"]),
    ]
    for history, reasons in cases:
        player = Player(renderer, history=history)
        messages: list[dict[str, Any]] = [user("x?")]
        messages.append(player.ask(messages, '[TOOL_CALLS] [{"name": "calc", "arguments": {"a": 1}}]', [TOOL]))
        messages.append(reply(messages[-1]))
        messages.append(player.ask(messages, " 3", [TOOL]))
        player.ask([*messages, user("y?")], " 4", [TOOL])
        assert player.forks() == reasons
        shown = renderer.decode(player.graph.turns[2].context_ids, skip_special=False)
        assert shown.count("[AVAILABLE_TOOLS]") == 1
        verify(player.trajectory())


def test_a_message_the_template_would_hide_is_a_fork(renderer_of: Callable[..., Renderer]):
    player = Player(renderer_of("deepseek_r1"))
    message = player.ask([user("x?")], "r\n</think>\n\n3")
    player.ask([user("x?"), message, system("be kind"), user("y?")], "r\n</think>\n\n4")
    assert player.graph.forks == {ForkReason.TEMPLATE_CHANGED: 1}
    assert "be kind<｜User｜>x?" in player.renderer.decode(player.sent[1], skip_special=False)
