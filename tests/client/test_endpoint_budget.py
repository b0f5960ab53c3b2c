"""The token budget of an episode against an endpoint: what the endpoint counted is what is spent."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from openai import AsyncOpenAI, omit

from agentrl.client import Client, SamplingConfig
from agentrl.errors import EpisodeLimit, ReplyError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_endpoint_episode
from agentrl.types import StopReason, Task
from agentrl.workflow import load_workflow
from tests.support.endpoints import endpoint_client, serving, streamed

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Endpoint:
    """An OpenAI-compatible server that says it sampled six tokens, or as many as it was allowed."""

    def __init__(self, *, counts: Any = True) -> None:  # noqa: ANN401
        self.bodies: list[dict[str, Any]] = []
        self.counts = counts

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        head = {"id": f"c{len(self.bodies)}", "created": 1, "model": "served"}
        sampled = min(6, *(body[name] for name in ("max_tokens", "max_completion_tokens") if name in body), 6)
        count = sampled if self.counts is True else self.counts
        usage = None if count is None else {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
            return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Hello"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": usage})
        return await streamed(request, [{**head, "object": "chat.completion.chunk", **chunk} for chunk in chunks])


def make(connection: AsyncOpenAI, budget: int | None, sampling: SamplingConfig | None = None) -> Client:
    return endpoint_client(connection, sampling=sampling, max_episode_tokens=budget)


async def test_the_token_budget_clips_and_then_refuses_as_in_training():
    endpoint = Endpoint()
    async with serving(endpoint.answer) as connection:
        client = make(connection, 10, SamplingConfig(max_tokens=50))
        await client.chat.completions.create(messages=HI)
        await client.with_options(timeout=60.0).chat.completions.create(messages=HI)
        with pytest.raises(EpisodeLimit, match="episode e: 10 of 10 sampled tokens are spent"):
            await client.chat.completions.create(messages=HI)
        assert client.limit_reached is StopReason.TOKEN_LIMIT
        assert client.close(StopReason.TOKEN_LIMIT).metrics["completion_tokens"] == 10
    assert [body["max_tokens"] for body in endpoint.bodies] == [10, 4]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ({}, {"max_tokens": 10}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 30}, {"max_tokens": 10}),
        ({"max_tokens": omit}, {"max_tokens": 10}),
        ({"max_completion_tokens": 30}, {"max_completion_tokens": 10}),
        ({"max_completion_tokens": 4}, {"max_completion_tokens": 4}),
        ({"extra_body": {"max_tokens": 30, "top_k": 2}}, {"max_tokens": 10, "top_k": 2}),
        ({"extra_body": {"max_completion_tokens": None}}, {"max_completion_tokens": 10}),
    ],
)
async def test_however_the_output_limit_is_given_it_is_within_the_budget(arguments: dict[str, Any], sent: dict[str, int]):
    endpoint = Endpoint()
    async with serving(endpoint.answer) as connection:
        await make(connection, 10).chat.completions.create(messages=HI, **arguments)
    [body] = endpoint.bodies
    assert {name: body[name] for name in body if name not in ("messages", "model", "stream")} == sent


async def test_without_a_budget_nothing_is_clipped_and_nothing_needs_to_be_counted():
    endpoint = Endpoint(counts=None)
    async with serving(endpoint.answer) as connection:
        client = make(connection, None)
        await client.chat.completions.create(messages=HI, max_tokens=500)
        assert [chunk async for chunk in await client.chat.completions.create(messages=HI, stream=True)]
    assert endpoint.bodies[0]["max_tokens"] == 500
    assert "stream_options" not in endpoint.bodies[1]


@pytest.mark.parametrize("counts", [None, 0, -3])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_endpoint_that_does_not_count_cannot_keep_to_a_budget(counts: int | None, stream: bool):
    async with serving(Endpoint(counts=counts).answer) as connection:
        client = make(connection, 10)

        async def ask() -> None:
            answer: Any = await client.chat.completions.create(messages=HI, stream=stream)  # pyright: ignore
            [chunk async for chunk in answer]

        with pytest.raises(ReplyError, match=r"episode e, http.*completion_tokens.*leave that budget out"):
            await ask()
        assert client.close(StopReason.SERVER_ERROR).turns == ()


@pytest.mark.parametrize("asks", [False, True])
async def test_a_stream_is_counted_and_shows_its_count_only_to_who_asked(asks: bool):
    async with serving(Endpoint().answer) as connection:
        client = make(connection, 6)
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if asks else {}
        chunks = [chunk async for chunk in await client.chat.completions.create(messages=HI, stream=True, **options)]
        assert [bool(chunk.choices) for chunk in chunks] == [True, True, *([False] if asks else [])]
        with pytest.raises(EpisodeLimit, match="6 of 6 sampled tokens"):
            await client.chat.completions.create(messages=HI, stream=True)
        assert len(client.close(StopReason.TOKEN_LIMIT).turns) == 1


async def endless(task: Task, client: Client) -> float:
    while True:
        await client.chat.completions.create(messages=HI)


@pytest.mark.parametrize(("counts", "reason"), [(True, StopReason.TOKEN_LIMIT), (None, StopReason.SERVER_ERROR)])
async def test_an_evaluated_episode_ends_with_the_budget_of_the_run(counts: bool | None, reason: StopReason):
    endpoint = Endpoint(counts=counts)
    async with serving(endpoint.answer) as connection:
        trajectory = await run_endpoint_episode(
            load_workflow(f"{__name__}:endless"),
            Task(id="t", data={}),
            endpoint=connection,
            model="served",
            rollout=RolloutConfig(max_episode_tokens=13, max_turns=None),
        )
    assert trajectory.stop_reason is reason
    assert [body["max_tokens"] for body in endpoint.bodies] == ([13, 7, 1] if counts else [13])
