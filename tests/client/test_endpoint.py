"""The evaluation client: a real openai client over HTTP, with the episode's rewards and budgets."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from agentrl.client import CallTimeout, Client, SamplingConfig
from agentrl.errors import EpisodeLimit, RequestRejected, RewardError, ServerUnavailable, WorkflowError
from agentrl.types import StopReason, Turn
from tests.support.chat import HI
from tests.support.endpoints import Endpoint, endpoint_client, serving


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_an_episode_runs_against_an_endpoint_with_the_same_surface():
    endpoint, seen = Endpoint(), list[Turn]()
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection, sampling=SamplingConfig(temperature=0.3, max_tokens=9), on_turn=seen.append)
        assert isinstance(client, AsyncOpenAI)
        completion = await client.chat.completions.create(messages=HI, model="ignored", top_p=0.5)
        assert isinstance(completion, ChatCompletion)
        await client.chat.completions.create(messages=[*HI, completion.choices[0].message, *HI], max_completion_tokens=3)
        client.reward(completion, 0.5)
        client.record(busy=1)
        trajectory = client.close(StopReason.COMPLETED, 1.0)
    first, second = endpoint.bodies
    assert (first["model"], first["temperature"], first["top_p"], first["max_tokens"]) == ("served", 0.3, 0.5, 9)
    assert second["max_completion_tokens"] == 3
    assert "max_tokens" not in second
    assert second["messages"][1]["content"] == "Hello there"
    assert [turn.reward for turn in trajectory.turns] == [0.5, None]
    assert len(seen) == 2
    assert trajectory.turns[0].message["content"] == "Hello there"
    assert trajectory.num_output_tokens == 0
    assert trajectory.metrics == {"prompt_tokens": 14.0, "completion_tokens": 4.0, "busy": 1.0}
    assert trajectory.episode_return == 1.5
    assert not trajectory.branches()[0].loss_mask.any()


async def test_a_turn_keeps_what_its_call_added_to_the_conversation_that_it_continues():
    endpoint, tools = Endpoint(), [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    more, other = {"role": "user", "content": "more"}, [{"role": "user", "content": "another talk"}]
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection)
        first = await client.chat.completions.create(messages=HI, tools=tools)
        assert isinstance(first, ChatCompletion)
        answer = first.choices[0].message
        await client.chat.completions.create(messages=other)
        await client.chat.completions.create(messages=[*HI, answer, more], tools=tools)
        await client.chat.completions.create(messages=[*HI, {"role": "assistant", "content": "Hello there"}, more])
        trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert [turn.parent for turn in trajectory.turns] == [None, None, 0, 0]
    assert [turn.messages for turn in trajectory.turns] == [tuple(HI), tuple(other), (more,), (more,)]
    assert [turn.tools for turn in trajectory.turns] == [tools, None, None, ()]
    assert [message["role"] for message in trajectory.messages(2)] == ["user", "assistant", "user", "assistant"]
    assert trajectory.turns[1].fork == "new_conversation"


async def test_streams_and_raw_responses_are_turns_too():
    endpoint = Endpoint()
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection)
        stream = await client.chat.completions.create(messages=HI, stream=True)
        chunks = [chunk async for chunk in stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        client.reward(chunks[-1], 1)
        raw = await client.chat.completions.with_raw_response.create(messages=HI, model="m")  # pyright: ignore
        assert raw.parse().choices[0].message.content == "Hello there"
        trajectory = client.close(StopReason.COMPLETED, 0.0)
    assert [turn.message["content"] for turn in trajectory.turns] == ["Hello there", "Hello there"]
    assert trajectory.turns[0].reward == 1.0


async def test_a_stream_left_early_is_no_turn():
    async with serving(Endpoint().answer) as connection:
        client = endpoint_client(connection, max_turns=1)
        async with await client.chat.completions.create(messages=HI, stream=True) as stream:
            await anext(stream)
        await client.chat.completions.create(messages=HI)
        assert len(client.close(StopReason.COMPLETED).turns) == 1


async def test_budgets_rewards_and_closing_behave_as_in_training():
    endpoint = Endpoint()
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection, max_turns=1)
        completion = await client.with_options(timeout=60.0).chat.completions.create(messages=HI)
        with pytest.raises(EpisodeLimit, match="1 of 1 turns"):
            await client.chat.completions.create(messages=HI)
        assert len(endpoint.bodies) == 1
        assert client.limit_reached is StopReason.TURN_LIMIT
        with pytest.raises(RewardError, match="finite"):
            client.reward(completion, float("nan"))
        with pytest.raises(WorkflowError, match="token ids"):
            await client.generate([1])
        async with client:
            pass
        await client.close()
        client.close(StopReason.COMPLETED, 1.0)
        with pytest.raises(WorkflowError, match="closed"):
            await client.chat.completions.create(messages=HI)


@pytest.mark.parametrize(("status", "error"), [(400, RequestRejected), (429, ServerUnavailable), (503, ServerUnavailable)])
async def test_http_errors_are_the_errors_of_training(status: int, error: type[Exception]):
    endpoint = Endpoint()
    endpoint.status = status
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection)
        for stream in (False, True):
            with pytest.raises(error, match=f"answered {status}") as caught:
                await client.chat.completions.create(messages=HI, stream=stream)
            assert isinstance(caught.value.__cause__, openai.APIStatusError)
        assert client.close(StopReason.SERVER_ERROR).turns == ()


async def test_refused_connections_and_timeouts_are_named():
    endpoint = Endpoint()
    endpoint.hold = anyio.Event()
    async with serving(endpoint.answer) as connection:
        with pytest.raises(CallTimeout, match="timeout"):
            await endpoint_client(connection).chat.completions.create(messages=HI, timeout=0.05)
        endpoint.hold.set()
        gone = connection.with_options(base_url="http://127.0.0.1:1/v1")
        with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
            await endpoint_client(gone).chat.completions.create(messages=HI)


async def test_completions_of_one_id_are_turns_of_their_own():
    endpoint = Endpoint()
    endpoint.identity = "always"
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection, max_turns=2)
        first, second = [await client.chat.completions.create(messages=HI) for _ in range(2)]
        with pytest.raises(EpisodeLimit, match="2 of 2 turns"):
            await client.chat.completions.create(messages=HI)
        client.reward(second, 0.5)
        client.reward(first, 0.25)
        with pytest.raises(WorkflowError, match="several completions the id 'always'"):
            client.reward("always", 1.0)
        assert [turn.reward for turn in client.close(StopReason.COMPLETED).turns] == [0.25, 0.5]


async def test_a_stream_that_is_just_left_gives_its_turn_back():
    async with serving(Endpoint().answer) as connection:
        client = endpoint_client(connection, max_turns=1)
        async for _ in await client.chat.completions.create(messages=HI, stream=True):
            break
        await client.chat.completions.create(messages=HI)
        assert len(client.close(StopReason.COMPLETED).turns) == 1


async def test_a_stream_that_has_ended_counts_once_while_somebody_holds_it():
    async with serving(Endpoint().answer) as connection:
        client = endpoint_client(connection, max_turns=2)
        held = await client.chat.completions.create(messages=HI, stream=True)
        assert [chunk async for chunk in held]
        await client.chat.completions.create(messages=HI)
        with pytest.raises(EpisodeLimit, match=r"2 of 2 turns are spent$"):
            await client.chat.completions.create(messages=HI)
        await held.close()
        assert len(client.close(StopReason.COMPLETED).turns) == 2


async def test_a_cancelled_call_is_no_turn():
    endpoint = Endpoint()
    endpoint.hold = anyio.Event()
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection, max_turns=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.chat.completions.create(messages=HI))
            await endpoint.entered.wait()
            tasks.cancel_scope.cancel()
        endpoint.hold.set()
        endpoint.hold = None
        await client.chat.completions.create(messages=HI)
        assert len(client.close(StopReason.COMPLETED).turns) == 1


def test_making_one_opens_nothing():
    connection = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="k")
    make_one: Callable[[], Client] = lambda: endpoint_client(connection)  # noqa: E731
    assert make_one()._client is make_one()._client  # pyright: ignore[reportPrivateUsage]
