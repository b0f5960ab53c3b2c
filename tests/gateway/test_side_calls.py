"""Sub-agents as declared branches, and calls beside the agent's own: who answers them, and whether they are trained."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from pydantic import ValidationError

from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.client import Client, Door, DoorSettings, OtherModel, ReplayBackend, SideCalls
from agentrl.engine.diagnostics import speaker_metrics
from agentrl.errors import ConfigError
from agentrl.tokens.verify import verify
from agentrl.types import ForkReason, StopReason, Trajectory
from tests.support.doors import HI, door_client, played, scripted_client
from tests.support.endpoints import Endpoint, serving

SUBAGENTS = DoorSettings(branches=("subagent",))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def messages_call(
    door: Door, messages: Sequence[Mapping[str, Any]], agent: str = "", **body: object
) -> dict[str, Any]:
    """Make a call as Claude Code does, for its main agent or for a sub-agent, and return the answer."""
    headers = {"User-Agent": "claude-cli/2.1.197 (external, cli)", **({"x-claude-code-agent-id": agent} if agent else {})}
    payload = {"model": "policy", "max_tokens": 64, "messages": messages, **body}
    address = f"{door.url}/v1/messages"
    async with aiohttp.ClientSession() as http, http.post(address, json=payload, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def reward(door: Door, value: float, answer: Mapping[str, Any]) -> None:
    body = {"reward": value, "response_id": answer["id"]}
    async with aiohttp.ClientSession() as http, http.post(door.reward_url, json=body) as response:
        assert response.status == 200, await response.text()


async def played_with_subagents(settings: DoorSettings) -> Trajectory:
    """Play a main agent that starts two sub-agents with the same words; each answer of theirs is rewarded at once."""
    client, _ = scripted_client(["plan", "one", "two", "two again", "done"])
    async with client.served(settings) as door:
        plan = await messages_call(door, user("task"))
        first = await messages_call(door, user("look"), agent="a1")
        await reward(door, 1.0, first)
        second = await messages_call(door, user("look"), agent="a2")
        await reward(door, 10.0, second)
        history = [*user("look"), {"role": "assistant", "content": second["content"]}, *user("again")]
        await messages_call(door, history, agent="a2")
        history = [*user("task"), {"role": "assistant", "content": plan["content"]}, *user("they say one, two")]
        await messages_call(door, history)
    return client.close(StopReason.COMPLETED, 100.0)


async def test_sub_agents_are_branches_of_their_own_only_where_that_is_declared():
    declared, undeclared = [await played_with_subagents(settings) for settings in (SUBAGENTS, DoorSettings())]
    for trajectory in (declared, undeclared):
        verify(trajectory)
        assert [turn.role for turn in trajectory.turns] == ["", *["subagent"] * 3, ""]
        assert [turn.parent for turn in trajectory.turns] == [None, None, None, 2, 0]
        assert {(turn.client, turn.dialect) for turn in trajectory.turns} == {("claude-cli/2.1.197", "messages")}
    assert [turn.branch for turn in declared.turns] == [(), (0,), (1,), (1,), ()]
    assert {turn.branch for turn in undeclared.turns} == {()}
    # Not declared: the second sub-agent's reward may depend on what the first one wrote.
    assert returns_to_go(declared, 1.0).tolist() == [111.0, 101.0, 110.0, 100.0, 100.0]
    assert returns_to_go(undeclared, 1.0).tolist() == [111.0, 111.0, 110.0, 100.0, 100.0]


async def test_two_sub_agents_that_send_the_same_body_at_once_are_two_turns():
    client, policy = scripted_client(["one", "two"])
    async with client.served() as door:
        for agent in ("a1", "a2"):
            await messages_call(door, user("look"), agent=agent)
    assert len(policy.calls) == len(client.turns) == 2
    assert "gateway.joined_retries" not in client.episode.metrics


async def test_a_header_and_a_path_name_the_agents_of_a_program_that_has_no_marks():
    client, _ = scripted_client(["one", "two", "three"])
    async with client.served(DoorSettings(branches=("worker",))) as door, aiohttp.ClientSession() as http:
        for path, headers in (
            ("role/worker/agent/1/v1", {}),
            ("v1", {"x-agentrl-role": "worker", "x-agentrl-agent": "2"}),
            ("role/worker/agent/1/v1", {}),
        ):
            body = {"messages": user(f"{len(client.turns)}")}
            async with http.post(f"{door.url}/{path}/chat/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
    assert [turn.branch for turn in client.episode.turns] == [(0,), (1,), (0,)]


@pytest.mark.parametrize("train", [False, True])
async def test_a_side_call_that_the_policy_answers_is_a_turn_which_is_trained_where_the_run_file_says_so(train: bool):
    client, _ = scripted_client(["A title", "work"])
    rule = SideCalls(models=("*haiku*",), train=train)
    async with client.served(DoorSettings(side_calls=rule)) as door:
        await messages_call(door, user("name it"), model="claude-haiku-4-5")
        await messages_call(door, user("task"))
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert [(turn.role, turn.left_out) for turn in trajectory.turns] == [("side_call", not train), ("", False)]
    trained = [bool(sample.loss_mask.any()) for sample in verify(trajectory)]
    assert trained == [train, True]
    assert trajectory.metrics["gateway.side_calls"] == 1.0
    assert speaker_metrics([trajectory]).get("left_out_turns") == (None if train else 1.0)


async def test_a_side_call_is_found_by_its_role_and_by_its_prompt():
    client, _ = scripted_client(["one", "two", "three"])
    rule = SideCalls(roles=("subagent",), prompts=("summarize",))
    async with client.served(DoorSettings(side_calls=rule)) as door:
        await messages_call(door, user("look"), agent="a1")
        await messages_call(door, user("task"), system="You summarize conversations.")
        await messages_call(door, user("please summarize"), system="You help.")
    assert [(turn.role, turn.left_out) for turn in client.episode.turns] == [
        ("subagent", True),
        ("side_call", True),
        ("", False),
    ]


ROLES: Any = {"critic": {"prompts": ["You find mistakes"]}, "subagent": {"prompts": ["You search", "You are a worker"]}}


def of_agent(dialect: str, system: str) -> tuple[str, dict[str, Any]]:
    """Return the route and the body of a call by an agent that its system prompt alone tells from others."""
    if dialect == "chat":
        return "chat/completions", {"messages": [{"role": "system", "content": system}, *user("Go.")]}
    if dialect == "responses":
        return "responses", {"instructions": system, "input": "Go."}
    return "messages", {"max_tokens": 9, "system": [{"type": "text", "text": system}], "messages": user("Go.")}


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_a_rule_gives_the_agents_of_a_program_without_marks_their_roles(dialect: str):
    settings = DoorSettings(roles=ROLES, branches=("subagent",), side_calls=SideCalls(roles=("critic",)))
    client, _ = scripted_client(["one", "two", "three", "four"])
    async with client.served(settings) as door, aiohttp.ClientSession() as http:
        for system, headers in (
            ("You plan. Never say: You find faults.", {}),
            ("You are a worker of the planner.", {}),
            ("You find mistakes of others.", {}),
            ("You search files.", {"x-agentrl-role": "named"}),
        ):
            route, body = of_agent(dialect, system)
            async with http.post(f"{door.base_url}/{route}", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
    found = [(turn.role, turn.branch, turn.left_out) for turn in client.episode.turns]
    assert found == [("", (), False), ("subagent", (0,), False), ("critic", (), True), ("named", (), False)]


@pytest.mark.parametrize("rule", [{"prompts": []}, {}, {"prompts": ["x"], "models": ["y"]}])
def test_a_rule_of_a_role_that_finds_no_call_is_refused(rule: dict[str, Any]):
    with pytest.raises(ValidationError, match="subagent"):
        DoorSettings.model_validate({"roles": {"subagent": rule}})


def titles(url: str) -> DoorSettings:
    return DoorSettings(side_calls=SideCalls(models=("small",), answer=OtherModel(base_url=url, model="other-model")))


@asynccontextmanager
async def playing(client: Client, other: Endpoint) -> AsyncGenerator[openai.AsyncOpenAI]:
    """Yield an unmodified client of a door whose side calls an endpoint answers."""
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(serving(other.answer))
        door = await stack.enter_async_context(client.served(titles(str(connection.base_url))))
        yield await stack.enter_async_context(door_client(door))


@pytest.mark.parametrize("stream", [False, True])
async def test_another_model_answers_side_calls_and_its_turns_have_no_tokens(stream: bool):
    other, replies = Endpoint(), ["work", "more work"]
    client, policy = scripted_client(replies)
    async with playing(client, other) as remote:
        ask: Any = remote.chat.completions.create
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        found = await ask(model="small", messages=HI, **options)
        pieces = [chunk.choices[0].delta.content async for chunk in found if chunk.choices] if stream else [played(found)]
        text = "".join(piece or "" for piece in pieces)
        first = await ask(model="policy", messages=HI)
        history = [*HI, first.choices[0].message.model_dump(exclude_none=True), *user("go on")]
        await ask(model="policy", messages=history)
        await ask(model="small", messages=history)
    [sent, later] = other.bodies
    assert (sent["model"], sent["messages"], sent["stream"]) == ("other-model", HI, False)
    assert "stream_options" not in sent
    assert later["messages"] == history
    assert len(policy.calls) == 2
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    side, *own, last = trajectory.turns
    assert side.message["content"] == text
    assert text
    assert (side.role, side.left_out, side.sent_after, side.fork) == ("side_call", True, 0, None)
    assert (last.left_out, last.sent_after, last.fork) == (True, 3, ForkReason.NEW_CONVERSATION)
    assert not side.output_ids.size
    assert [turn.parent for turn in trajectory.turns] == [None, None, 1, None]
    samples = verify(trajectory)
    assert [int(sample.loss_mask.sum()) for sample in samples] == [0, sum(len(turn.output_ids) for turn in own), 0]
    assert np.array_equal(returns_to_go(trajectory, 1.0), np.ones(4))

    repeated = Client(ReplayBackend(trajectory))
    async with repeated.served(titles("http://127.0.0.1:9/v1")) as door, door_client(door) as remote:
        again = await remote.chat.completions.create(model="small", messages=HI)
    assert again.choices[0].message.content == text
    assert repeated.episode.turns[0].left_out


async def test_another_model_that_is_down_is_an_error_of_its_call_and_leaves_no_turn():
    other = Endpoint()
    other.status = 400
    client, _ = scripted_client(["work"])
    async with playing(client, other) as remote:
        with pytest.raises(openai.APIStatusError):
            await remote.chat.completions.create(model="small", messages=HI)
        assert client.unresolved_error is not None
        await remote.chat.completions.create(model="policy", messages=HI)
    assert client.unresolved_error is None
    assert len(client.turns) == 1


async def test_a_missing_key_of_another_model_is_named_before_the_door_opens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OTHER_KEY", raising=False)
    client, _ = scripted_client([])
    answer = OtherModel(base_url="http://127.0.0.1:9/v1", model="m", api_key_env="OTHER_KEY")
    with pytest.raises(ConfigError, match="OTHER_KEY is not set"):
        async with client.served(DoorSettings(side_calls=SideCalls(models=("m",), answer=answer))):
            pass


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "names no call"),
        (
            {"models": ["m"], "train": True, "answer": {"base_url": "http://h/v1", "model": "m"}},
            "needs answers of the policy",
        ),
        ({"models": ["m"], "anwser": "policy"}, "anwser"),
    ],
)
def test_a_rule_that_cannot_hold_is_refused(fields: dict[str, object], reason: str):
    with pytest.raises(ValidationError, match=reason):
        SideCalls.model_validate(fields)
