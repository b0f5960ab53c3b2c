"""Random episodes: whatever is asked, in whatever order, the branches are what was sent and sampled."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from agentrl.errors import TokenError
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import ForkReason
from tests.tokens.dialogues import TOOL, system, user
from tests.tokens.families import FAMILIES
from tests.tokens.play import Player

OUTPUTS = (
    "a plain answer",
    "",
    " spaced \n",
    "<think>\nhm\n</think>\n\nsure",
    '<tool_call>\n{"name":  "calc", "arguments": {"b": 2, "a": 1}}\n</tool_call>',
    'both\n<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "calc"}\n</tool_call>',
    "<tool_call>broken",
    "[TOOL_CALLS] [{\"name\": \"calc\", \"arguments\": {}}]",
    '{"name": "calc", "parameters": {"a": 1}}',
    "<|im_end|> in words",
)  # fmt: skip
ACTIONS = ("go on", "go on", "go on", "parallel", "retry", "back", "edit", "drop", "other tools", "new", "respell")


class Episode:
    """One random walk: conversations grow, branch, and are rewritten."""

    def __init__(self, player: Player, tools: bool, data: st.DataObject) -> None:
        self.player = player
        self.tools = [TOOL] if tools else None
        self.data = data
        self.conversations: list[list[dict[str, Any]]] = []

    def draw(self, values: tuple[str, ...]) -> str:
        return self.data.draw(st.sampled_from(values))

    def follow_up(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        calls = message.get("tool_calls") or []
        words = self.data.draw(st.text(alphabet=st.sampled_from("ab <|im_end|>{}\n3é🙂"), max_size=12))
        if calls:
            return [{"role": "tool", "tool_call_id": call["id"], "content": words} for call in calls]
        return [user(words + "?")]

    def ask(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        end, text = self.data.draw(st.booleans()), self.draw(OUTPUTS)
        prompt = self.player.graph.prepare(messages, tools)
        message = self.player.answer(prompt, text, end=end)
        self.conversations.append([*messages, message])

    def step(self) -> None:
        action = self.draw(ACTIONS) if self.conversations else "new"
        if action == "new":
            start = [user("first " + self.draw(("a", "b")))]
            self.ask([system("s"), *start] if self.data.draw(st.booleans()) else start, self.tools)
            return
        conversation = self.data.draw(st.sampled_from(self.conversations))
        messages = [*conversation, *self.follow_up(conversation[-1])]
        if action == "edit":
            messages = copy.deepcopy(messages)
            place = self.data.draw(st.integers(0, len(messages) - 1))
            messages[place]["content"] = "edited"
        elif action == "drop" and len(conversation) > 3:
            messages = [*conversation[: len(conversation) // 2], *self.follow_up(conversation[-1])]
        elif action == "back":
            messages = conversation[:-1]
        elif action == "respell":
            messages = json.loads(json.dumps(messages, sort_keys=True))
        elif action == "parallel":
            self.ask([*conversation, *self.follow_up(conversation[-1])], self.tools)
        elif action == "retry":
            self.ask(messages, self.tools)
        tools = self.tools
        if action == "other tools" and tools:
            tools = json.loads(json.dumps(tools))
            tools[0]["function"]["description"] = "other"
        self.ask(messages, tools)


@pytest.mark.parametrize("history", ["keep", "as_template"])
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_branches_equal_what_was_sent_and_sampled(
    name: str, history: Literal["keep", "as_template"], renderer_of: Callable[..., Renderer], data: st.DataObject
):
    player = Player(renderer_of(name), history=history)
    episode = Episode(player, tools=FAMILIES[name].tools and data.draw(st.booleans()), data=data)
    for _ in range(data.draw(st.integers(1, 7))):
        recorded = len(player.graph.turns)
        try:
            episode.step()
        except TokenError:  # some templates refuse some orders of roles
            assert FAMILIES[name].name in ("llama31", "llama32", "mistral", "deepseek_r1")
            assert len(player.graph.turns) in (recorded, recorded + 1)
    trajectory = player.trajectory()
    verify(trajectory)
    trained: dict[int, int] = {}
    for sample, leaf in zip(trajectory.branches(), trajectory.leaves(), strict=True):
        path = trajectory.path(leaf)
        for turn in path:
            upto = player.sent[turn] + player.sampled[turn]
            assert sample.token_ids[: len(upto)].tolist() == upto
            trained[turn] = trained.get(turn, 0) + int(sample.loss_mask[sample.turn_index == turn].sum())
        assert len(sample.token_ids) == len(player.sent[leaf]) + len(player.sampled[leaf])
    assert trained == {turn: len(sampled) for turn, sampled in enumerate(player.sampled)}
    assert sum(player.graph.forks.values()) == sum(turn.fork is not None for turn in trajectory.turns)
    if history == "keep" and FAMILIES[name].name in ("qwen25", "qwen3", "llama31", "llama32"):
        assert ForkReason.THINKING_STRIPPED not in player.graph.forks


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama31", "llama32"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_conversation_that_only_grows_is_one_branch(name: str, renderer_of: Callable[..., Renderer], data: st.DataObject):
    player = Player(renderer_of(name))
    episode = Episode(player, tools=True, data=data)
    messages: list[dict[str, Any]] = [user("x?")]
    single = tuple(text for text in OUTPUTS if text.count("<tool_call>") < 2)
    for _ in range(data.draw(st.integers(1, 6))):
        message = player.ask(messages, episode.draw(single), episode.tools, end=data.draw(st.booleans()))
        messages = json.loads(json.dumps([*messages, message, *episode.follow_up(message)]))
    assert player.parents() == [None, *range(len(player.sent) - 1)]
    assert not player.graph.forks
    [sample] = player.trajectory().branches()
    assert sample.token_ids.tolist() == player.sent[-1] + player.sampled[-1]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_text_of_a_kept_history_is_the_template_text(name: str, renderer_of: Callable[..., Renderer], data: st.DataObject):
    """Where the model writes what the template would, joined contexts and outputs are the template's own text."""
    if name in ("qwen3", "deepseek_r1"):  # those rewrite their history; see test_thinking.py
        return
    player = Player(renderer_of(name))
    messages: list[dict[str, Any]] = [user("first")]
    for _ in range(data.draw(st.integers(1, 4))):
        word = data.draw(st.sampled_from(("one", "two <b>", "três")))
        messages.append(player.ask(messages, " " + word if name == "mistral" else word))
        messages.append(user(data.draw(st.text(alphabet=st.sampled_from("ab é<|\n["), max_size=8)) + "?"))
    prompt = player.graph.prepare(messages)
    renderer = player.renderer
    expected = renderer.render_text(renderer.plain(messages), generation_prompt=True)
    shown = renderer.decode(prompt.context.ids(), skip_special=False)
    assert shown == expected


def respelled(message: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a new message of the same meaning whose text, if it is not the model's, is a list of parts."""
    fields = message.model_dump(exclude_none=True) if isinstance(message, BaseModel) else copy.deepcopy(message)
    if fields["role"] != "assistant":
        fields["content"] = [{"type": "text", "text": fields["content"]}]
    return fields


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_request_stands_where_the_same_request_read_anew_stands(renderer_of: Callable[..., Renderer], data: st.DataObject):
    """What is remembered of messages, which are changed in place here, never changes what a request extends."""
    player, other = Player(renderer_of("qwen3")), Player(renderer_of("qwen3"))
    episode = Episode(player, tools=True, data=data)
    messages: list[Any] = [user("x?")]
    actions = ("go on", "go on", "go on", "go on", "fail", "edit", "back", "new", "swap", "ids")
    for _ in range(data.draw(st.integers(2, 10))):
        match episode.draw(actions):
            case "fail":
                asked = [*messages, user("never answered")] if data.draw(st.booleans()) else messages
                player.graph.prepare(asked, episode.tools)
            case "edit":
                message = messages[data.draw(st.integers(0, len(messages) - 1))]
                if isinstance(message, BaseModel):
                    name = data.draw(st.sampled_from(("content", "reasoning_content")))
                    setattr(message, name, data.draw(st.sampled_from(("a plain answer", "edited"))))
                else:
                    message["content"] = data.draw(st.sampled_from(("a plain answer", "edited", "x?")))
            case "back":
                del messages[1 + data.draw(st.integers(0, len(messages) - 1)) :]
            case "new":
                messages = [user(episode.draw(("x?", "y?")))]
            case "swap":
                messages = [*messages[:-1], copy.deepcopy(messages[-1])]
            case "ids":
                for each in (player, other):
                    each.answer(
                        each.graph.prepare_ids([1, 2], parent=len(each.graph.turns) - 1 if each.graph.turns else None), "x"
                    )
            case _:
                tools = episode.tools if data.draw(st.integers(0, 9)) else None
                text = episode.draw(OUTPUTS)
                prompts = [player.graph.prepare(messages, tools), other.graph.prepare([*map(respelled, messages)], tools)]
                assert prompts[0].extension == prompts[1].extension
                answer = player.answer(prompts[0], text)
                assert other.answer(prompts[1], text) == answer
                as_object = data.draw(st.booleans())
                messages.append(ChatCompletionMessage.model_validate(answer) if as_object else answer)
                messages += episode.follow_up(answer)
    assert player.forks() == other.forks()
