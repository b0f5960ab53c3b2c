"""What an agent gives up it has sampled: streams closed early, timeouts and races teach exactly the policy gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anthropic
import anyio
import openai
import pytest

from agentrl.client import Client, ReplayBackend
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_client_episode, run_policy_episode
from agentrl.servers.scripted.script import Hold, ScriptedCall, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task, Turn
from tests.rollout.harness import PATIENCE_S, SAMPLING, TASK, Judge, make_server, workflow_of
from tests.rollout.impatient_agents import (
    PAID,
    answer_or_none,
    break_and_ask,
    break_and_return,
    cancel_when,
    close_and_pay,
    close_early,
    give_up_a_stream,
    give_up_and_ask_again,
    give_up_for_nothing,
    race,
)
from tests.rollout.letters import Program, Stage, all_episodes, answer_to, asked, check_gradient, opened
from tests.support.doors import door_client, until


async def cancel_natively(client: Client, stage: Stage) -> float:
    """`asyncio.Task.cancel`, as `asyncio.timeout` and `asyncio.wait_for` use it."""
    held = asyncio.ensure_future(stage.hold("one").reached.wait())  # noqa: TID251
    call = asyncio.ensure_future(answer_to(client, "one"))  # noqa: TID251
    await asyncio.wait([call, held], return_when=asyncio.FIRST_COMPLETED)  # noqa: TID251
    held.cancel()
    if call.done():
        return 1.0 + 0.5 * len(call.result())
    call.cancel()
    await asyncio.wait([call])  # noqa: TID251
    return -0.25


async def ended_before(hold: Hold, work: Coroutine[Any, Any, Any]) -> bool:
    """Run work in a task that nobody waits for once a hold is reached; return whether it ended before that."""
    held = asyncio.ensure_future(hold.reached.wait())  # noqa: TID251
    task = asyncio.ensure_future(work)  # noqa: TID251
    await asyncio.wait([task, held], return_when=asyncio.FIRST_COMPLETED)  # noqa: TID251
    held.cancel()
    return task.done()


async def leave_running(client: Any, stage: Stage) -> float:  # noqa: ANN401
    """Return while a call runs, as after `asyncio.wait` for the first of several."""
    found: list[str] = []

    async def ask() -> None:
        found.append(await answer_to(client, "one"))

    return 1.0 + 0.5 * len(found[0]) if await ended_before(stage.hold("one"), ask()) else -0.25


async def leave_a_reader(client: Any, stage: Stage) -> float:  # noqa: ANN401
    """Return while a task reads a stream."""
    read = [""]

    async def follow() -> None:
        async for chunk in await opened(client, "one"):
            read[0] += chunk.choices[0].delta.content or "" if chunk.choices else ""

    ended = await ended_before(stage.hold("one"), follow())
    return len(read[0]) - 0.4 * ended


async def leave_a_connection(remote: Any, stage: Stage, *, stream: bool = False) -> float:  # noqa: ANN401
    """End an agent whose task still waits for an answer, and loses its connection then."""
    read = [""]

    async def ask() -> None:
        with suppress(openai.APIError):
            if stream:
                async for chunk in await opened(remote, "one"):
                    read[0] += chunk.choices[0].delta.content or "" if chunk.choices else ""
            else:
                read[0] = await answer_to(remote, "one")

    ended = await ended_before(stage.hold("one"), ask())
    return 0.3 * len(read[0]) - 0.4 * ended


async def leave_a_reading_connection(remote: Any, stage: Stage) -> float:  # noqa: ANN401
    return await leave_a_connection(remote, stage, stream=True)


async def leave_running_at_a_limit(client: Any, stage: Stage) -> float:  # noqa: ANN401
    """Make two calls at once in an episode that has room for one; the other one is refused."""
    stage.hold("one")
    first = asyncio.ensure_future(answer_to(client, "one"))  # noqa: TID251
    await stage.holds["one"].reached.wait()
    await asyncio.gather(first, answer_to(client, "two"))  # noqa: TID251
    return 1.0


def over_http(program: Callable[[Any, Stage], Any]) -> Program:
    """Play a program through a door, with an unmodified client."""

    async def play(client: Client, stage: Stage) -> float:
        async with client.served() as door, door_client(door) as remote:
            return await program(remote, stage)

    return play


async def leave_over_http(stream: Any, stage: Stage, letters_of: Callable[[Any], str]) -> float:  # noqa: ANN401
    """Leave a stream after two letters; the door has read no more than they, either."""
    text = ""
    async with stream:
        async for event in stream:
            text += letters_of(event)
            if len(text) == 2:
                break
        if text == "aa":
            await stage.hold("one").reached.wait()
    return PAID[text]


async def close_a_chat(remote: Any, stage: Stage) -> float:  # noqa: ANN401
    stage.hold("one")
    stream = await opened(remote, "one")
    return await leave_over_http(stream, stage, lambda chunk: chunk.choices[0].delta.content or "" if chunk.choices else "")


async def close_a_response(remote: Any, stage: Stage) -> float:  # noqa: ANN401
    stage.hold("one")
    stream = await remote.responses.create(model="m", input=[asked("one")], stream=True)
    return await leave_over_http(stream, stage, lambda event: event.delta if event.type.endswith("text.delta") else "")


async def close_a_message(client: Client, stage: Stage) -> float:
    stage.hold("one")
    async with client.served() as door:
        given = door.environment()
        async with anthropic.AsyncAnthropic(
            base_url=given["ANTHROPIC_BASE_URL"], auth_token=door.key, max_retries=0
        ) as remote:
            stream = await remote.messages.create(
                model="m", max_tokens=8, messages=[{"role": "user", "content": "one"}], stream=True
            )
            return await leave_over_http(
                stream, stage, lambda event: event.delta.text if event.type == "content_block_delta" else ""
            )


async def retry_over_http(client: Client, stage: Stage) -> float:
    """A client whose call takes too long makes it again, marked so; the second try may take too long, too."""
    async with client.served() as door, door_client(door) as remote:
        for count in range(2):
            answer = await answer_or_none(remote, stage, "one", extra_headers={"x-stainless-retry-count": str(count)})
            if answer is not None:
                return 1.0 - 0.5 * count + 0.2 * len(answer)
            await until(lambda: not client.episode.calls.in_flight)  # until the door knows; the retry joins a running call
            stage.holds["one"] = Hold(at=2)
    return -1.0


ANYWHERE: list[Program] = [
    close_early,
    break_and_ask,
    break_and_return,
    close_and_pay,
    give_up_and_ask_again,
    give_up_for_nothing,
    give_up_a_stream,
    race,
]
ON_ASYNCIO: list[Program] = [
    cancel_natively,
    leave_running,
    leave_a_reader,
    over_http(leave_a_connection),
    over_http(leave_a_reading_connection),
    over_http(close_a_chat),
    over_http(close_a_response),
    close_a_message,
    retry_over_http,
    over_http(give_up_and_ask_again),
    over_http(give_up_for_nothing),
]


@pytest.mark.parametrize("program", ANYWHERE)
async def test_what_an_agent_gives_up_teaches_the_policy_gradient(program: Program, renderer: Renderer) -> None:
    await check_gradient(program, renderer)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("program", ON_ASYNCIO)
async def test_it_does_so_over_http_and_where_asyncio_cancels(program: Program, renderer: Renderer) -> None:
    await check_gradient(program, renderer)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("sampled", [0, 2])
@pytest.mark.parametrize("program", [leave_running, leave_running_at_a_limit])
async def test_a_call_that_the_workflow_leaves_running_is_ended_and_has_not_failed(
    program: Program, sampled: int, renderer: Renderer
) -> None:
    hold = Hold(at=sampled)
    stage = Stage({"one": hold})
    server = make_server(renderer, lambda call: ScriptedReply(output="good", holds=(hold,)))
    with anyio.fail_after(PATIENCE_S):
        trajectory = await run_policy_episode(
            workflow_of(lambda task, client: program(client, stage)),
            TASK,
            backend=server,
            renderer=renderer,
            rollout=RolloutConfig(episode_timeout_s=PATIENCE_S, max_turns=1),
            sampling=SAMPLING,
        )
    ended = StopReason.COMPLETED if program is leave_running else StopReason.TURN_LIMIT
    assert (trajectory.failure, trajectory.stop_reason) == (None, ended)
    assert [len(turn.output_ids) for turn in trajectory.turns] == [sampled] * (sampled > 0)
    assert len(server.aborted) == 1


async def test_a_call_that_is_given_up_is_a_turn_of_what_was_sampled(renderer: Renderer) -> None:
    episodes = await all_episodes(give_up_and_ask_again, renderer)
    one = next(each.trajectory for each in episodes if each.answers == (("one", "aab"), ("one", "b")))
    first, second = one.turns
    assert (first.stop_reason, first.message["content"], len(first.output_ids)) == (StopReason.ABORT, "aa", 2)
    assert (second.stop_reason, second.parent, second.fork) == (StopReason.STOP, None, "new_conversation")
    assert first.context_ids.tolist() == second.context_ids.tolist()


async def test_a_stream_that_is_left_is_continued_by_the_text_that_it_gave(renderer: Renderer) -> None:
    for each in await all_episodes(break_and_ask, renderer):
        first, second = each.trajectory.turns
        assert (second.parent, second.fork) == (0, None)
        assert first.stop_reason is (StopReason.STOP if each.answers[0][1] == "b" else StopReason.ABORT)


async def test_the_deadline_of_the_episode_records_nothing_of_the_call_that_it_cuts(renderer: Renderer) -> None:
    hold = Hold(at=2)
    server = make_server(renderer, lambda call: ScriptedReply(output="good", holds=(hold,)))
    rollout = RolloutConfig(episode_timeout_s=0.5)
    trajectory = await run_policy_episode(
        Judge(), TASK, backend=server, renderer=renderer, rollout=rollout, sampling=SAMPLING
    )
    assert (trajectory.stop_reason, trajectory.turns) == (StopReason.DEADLINE, ())


async def test_a_run_that_stops_does_not_wait_for_a_call_and_records_nothing_of_it(renderer: Renderer) -> None:
    hold, turns = Hold(at=2), list[Turn]()
    server = make_server(renderer, lambda call: ScriptedReply(output="good", holds=(hold,)))

    async def run() -> None:
        await run_policy_episode(
            Judge(),
            TASK,
            backend=server,
            renderer=renderer,
            rollout=RolloutConfig(episode_timeout_s=PATIENCE_S),
            sampling=SAMPLING,
            on_turn=turns.append,
        )

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await hold.reached.wait()
            tasks.cancel_scope.cancel()
    assert turns == []
    assert len(server.aborted) == 1


CALLING = '<tool_call>\n{"name": "run", "arguments": {"code": "x"}}\n</tool_call>'


def encoded(renderer: Renderer, text: str) -> list[int]:
    """Return the ids of text, one for each byte or so."""
    return list(renderer.encode_content(text))


@pytest.mark.parametrize("at", range(1, 13))
@pytest.mark.parametrize("says", ["It is. " + CALLING, "<think>\nwell\n</think>\n\nzwölf €🙂"])
async def test_a_stream_that_is_left_anywhere_is_continued_by_what_it_gave(renderer: Renderer, says: str, at: int) -> None:
    tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
    hold = Hold(at=at)

    async def run(task: Task, client: Client) -> float:
        shown: dict[str, Any] = {"role": "assistant", "content": ""}
        stream = await client.chat.completions.create(messages=[asked("one")], tools=[tool], stream=True)
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel_when, hold, scope)
                async for chunk in stream:
                    delta = chunk.choices[0].delta
                    shown["content"] += delta.content or ""
                    if reasoning := getattr(delta, "reasoning_content", None):
                        shown["reasoning_content"] = shown.get("reasoning_content", "") + reasoning
            tasks.cancel_scope.cancel()
        for message in (shown, client.turns[0].message):
            await client.chat.completions.create(messages=[asked("one"), message, asked("two")], tools=[tool])
        return 1.0

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output=says_ids, holds=() if call.index else (hold,))

    says_ids = [*encoded(renderer, says), min(renderer.eos_ids)]
    with anyio.fail_after(PATIENCE_S):
        trajectory = await run_policy_episode(
            workflow_of(run),
            TASK,
            backend=make_server(renderer, script),
            renderer=renderer,
            rollout=RolloutConfig(episode_timeout_s=PATIENCE_S),
            sampling=SAMPLING.model_copy(update={"max_tokens": 200}),
        )
    assert trajectory.failure is None, trajectory.failure
    first, *later = trajectory.turns
    assert first.stop_reason is StopReason.ABORT
    assert first.output_ids.tolist() == says_ids[:at]
    assert "\ufffd" not in str(first.message["content"])
    assert [(turn.parent, turn.fork) for turn in later] == [(0, None), (0, None)]
    verify(trajectory)


@pytest.mark.parametrize("program", [close_early, break_and_ask])
async def test_an_episode_with_a_call_that_was_given_up_replays(program: Program, renderer: Renderer) -> None:
    for each in await all_episodes(program, renderer):
        backend = ReplayBackend(each.trajectory)

        def run(task: Task, client: Client) -> Any:  # noqa: ANN401
            return program(client, Stage())

        with anyio.fail_after(PATIENCE_S):
            again = await run_client_episode(workflow_of(run), TASK, Client(backend), timeout_s=PATIENCE_S)
        assert (again.failure, backend.diverged) == (None, [])
        assert again.final_reward == each.trajectory.final_reward
        assert [turn.stop_reason for turn in again.turns] == [turn.stop_reason for turn in each.trajectory.turns]
