"""Credit with the real client: how long an answer takes trains nothing, and a reward in hindsight reaches who decided it."""

from __future__ import annotations

import anyio
import pytest

from agentrl.algo.advantages.turn_returns import returns_to_go
from agentrl.algo.batch_advantages import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.client import Client
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import Hold, ScriptedCall, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.types import Group, StopReason, Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from tests.rollout.harness import PATIENCE_S, SAMPLING, TASK, ask, make_server

TURN = AlgorithmConfig(advantage="turn", group_size=2)


async def play(
    workflow: RolloutWorkflow, renderer: Renderer, answers: dict[str, ScriptedReply], max_turns: int | None = None
) -> Trajectory:
    """Return an episode in which a call whose question is a key of `answers` gets that answer."""

    def script(call: ScriptedCall) -> ScriptedReply:
        text = renderer.decode(call.input_ids, skip_special=False)
        return next(reply for question, reply in answers.items() if question in text)

    with anyio.fail_after(PATIENCE_S):
        trajectory = await run_policy_episode(
            workflow,
            TASK,
            backend=make_server(renderer, script),
            renderer=renderer,
            rollout=RolloutConfig(max_turns=max_turns),
            sampling=SAMPLING.model_copy(update={"max_tokens": 64}),
        )
    assert trajectory.failure is None, trajectory.failure
    return trajectory


class Race(RolloutWorkflow):
    """Two independent agents: A makes two calls and is paid 1; B makes one call, which nobody pays."""

    def __init__(self, hold: Hold | None, *, declared: bool) -> None:
        self.hold, self.declared = hold, declared
        self.first_is_sent, self.other_is_done = anyio.Event(), anyio.Event()

    async def run(self, task: Task, client: Client) -> float:
        """Force the order: B is complete before A's second call if its answer is short, else after A is paid."""
        first, other = (client.branch(), client.branch()) if self.declared else (client, client)

        async def run_other() -> None:
            await ask(other, "agent B")
            self.other_is_done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_other)
            if self.hold is not None:
                await self.hold.reached.wait()
            else:
                await self.other_is_done.wait()
            await ask(first, "agent A, first")
            messages = [{"role": "user", "content": "agent A, second"}]
            second = await first.chat.completions.create(messages=messages)
            first.reward(second, 1.0)
            if self.hold is not None:
                self.hold.release.set()
        return 0.0


async def race(renderer: Renderer, *, long: bool, declared: bool) -> Trajectory:
    hold = Hold(at=3) if long else None
    answers = {
        "agent B": ScriptedReply(output="a long answer of B", holds=(hold,)) if hold else ScriptedReply(output="b"),
        "agent A, first": ScriptedReply(output="one"),
        "agent A, second": ScriptedReply(output="two"),
    }
    return await play(Race(hold, declared=declared), renderer, answers)


def of_question(trajectory: Trajectory, question: str) -> int:
    [found] = [at for at, turn in enumerate(trajectory.turns) if question in str(turn.messages[0]["content"])]
    return found


@pytest.mark.parametrize("declared", [False, True])
async def test_the_length_of_an_answer_that_runs_beside_paid_work_is_not_trained(renderer: Renderer, declared: bool) -> None:
    short = await race(renderer, long=False, declared=declared)
    long = await race(renderer, long=True, declared=declared)
    places = [of_question(one, "agent B") for one in (short, long)]
    assert places == [0, 2], "the order of completion depends on the answer's length"
    credit = [returns_to_go(one, 1.0)[place] for one, place in zip((short, long), places, strict=True)]
    assert credit == ([0.0, 0.0] if declared else [1.0, 1.0])
    group = Group(index=0, task=TASK, episodes=(short, long), admitted_version=0)
    estimate = advantages(group, TURN)
    assert [values[place] for values, place in zip(estimate.per_turn, places, strict=True)] == [0.0, 0.0]


class Judged(RolloutWorkflow):
    """A plan and its execution; the plan is judged by the execution, after it."""

    async def run(self, task: Task, client: Client) -> float:
        plan = await client.chat.completions.create(messages=[{"role": "user", "content": "plan"}])
        done = await ask(client, "execute")
        client.reward(plan, float("well" in done))
        return 0.0


async def test_a_reward_in_hindsight_reaches_the_turn_that_decided_it(renderer: Renderer) -> None:
    episodes: list[Trajectory] = []
    for done in ("done well", "done badly"):
        answers = {"plan": ScriptedReply(output="go"), "execute": ScriptedReply(output=done)}
        episodes.append(await play(Judged(), renderer, answers))
    group = Group(index=0, task=TASK, episodes=tuple(episodes), admitted_version=0)
    assert [values.tolist() for values in advantages(group, TURN).per_turn] == [[1.0, 1.0], [-1.0, -1.0]]


class HalfRead(RolloutWorkflow):
    """Acts on the first words of a stream before it ends."""

    async def run(self, task: Task, client: Client) -> float:
        stream = await client.chat.completions.create(messages=[{"role": "user", "content": "think aloud"}], stream=True)
        async with stream:
            await anext(stream)
            act = await client.chat.completions.create(messages=[{"role": "user", "content": "act"}])
            client.reward(act, 1.0)
            async for _ in stream:
                pass
        return 0.0


async def test_a_stream_that_is_read_half_way_gets_the_reward_of_the_call_that_it_caused(renderer: Renderer) -> None:
    answers = {"think aloud": ScriptedReply(output="first this then that"), "act": ScriptedReply(output="acted")}
    trajectory = await play(HalfRead(), renderer, answers)
    assert [turn.sent_after for turn in trajectory.turns] == [0, 0]
    assert of_question(trajectory, "think aloud") == 1
    assert returns_to_go(trajectory, 1.0).tolist() == [1.0, 1.0]


class Fan(RolloutWorkflow):
    """Three agents at once, each in a branch of its own."""

    async def run(self, task: Task, client: Client) -> float:
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask, client.branch(), "work")
        return 1.0


async def test_branches_share_the_budgets_of_their_episode(renderer: Renderer) -> None:
    answers = {"work": ScriptedReply(output="worked")}
    whole = await play(Fan(), renderer, answers, max_turns=3)
    assert {turn.branch for turn in whole.turns} == {(0,), (1,), (2,)}
    assert (await play(Fan(), renderer, answers, max_turns=2)).stop_reason is StopReason.TURN_LIMIT
