"""A deadline that the policy reaches by taking turns is a limit; one that something else runs into is a failure."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

import anyio
import pytest

from agentrl.algo.batch_advantages import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.client import Client, ReplayBackend
from agentrl.client.tools import tool
from agentrl.env.faults import environment_boundary
from agentrl.episode.tape import ask as cassette_ask
from agentrl.errors import EnvironmentFault, ServerError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_client_episode, run_policy_episode
from agentrl.rollout.group import run_group
from agentrl.servers.scripted.server import Fault, ScriptedCall, ScriptedReply
from agentrl.tokens.renderer import Renderer
from agentrl.types import Group, StopReason, Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from agentrl_sandbox.base import SandboxPool
from agentrl_sandbox.session import Session
from agentrl_sandbox.types import Limits, Program, Result
from tests.rollout.harness import SAMPLING, TASK, ask, workflow_of
from tests.rollout.paced import DEADLINE_S, Paced, each, run_slowly
from tests.support.scripted import in_virtual_time


class Stubborn(RolloutWorkflow):
    """Asks until the policy stops; 1 for stopping."""

    async def run(self, task: Task, client: Client) -> float:
        while await ask(client, "loop or stop?") != "stop":
            pass
        return 1.0


def expected_gradient(renderer: Renderer, rollout: RolloutConfig) -> float:
    """Return the expected policy gradient of a group of two on the logit of "loop", summed over all groups that can be.

    Each member decides once, with probability 1/2: it loops for ever, or stops.
    """
    total = 0.0

    async def add(choices: tuple[str, ...]) -> None:
        nonlocal total

        def script(call: ScriptedCall) -> str:
            return choices[int(call.episode_id.split(".")[1])]

        backend = Paced(renderer, script, each(3.0))
        run = partial(run_policy_episode, Stubborn(), backend=backend, renderer=renderer, rollout=rollout, sampling=SAMPLING)
        group = await run_group(
            TASK, index=0, group_size=2, admitted_version=1, run=run, rollout=rollout, slots=anyio.Semaphore(2)
        )
        if isinstance(group, Group):
            per_turn = advantages(group, AlgorithmConfig(group_size=2, normalize_std=False)).per_turn
            for values, choice in zip(per_turn, choices, strict=True):
                total += 0.25 * values[0] * (0.5 if choice == "loop" else -0.5)

    for choices in itertools.product(("loop", "stop"), repeat=2):
        in_virtual_time(partial(add, choices))
    return total


def test_looping_into_the_deadline_has_the_gradient_of_looping_into_a_turn_limit(renderer: Renderer) -> None:
    by_turns = expected_gradient(renderer, RolloutConfig(max_turns=20))
    by_time = expected_gradient(renderer, RolloutConfig(episode_timeout_s=DEADLINE_S))
    assert by_time == by_turns == -0.25


class Pausing(Stubborn):
    """Asks until the policy stops; waits between turns, and at the deadline, for somewhat less time than a turn takes."""

    async def run(self, task: Task, client: Client) -> float:
        for _ in itertools.count():
            if await ask(client, "loop or stop?") == "stop":
                break
            await anyio.sleep(2.9)
        return 1.0


@pytest.mark.parametrize("workflow", [Stubborn, Pausing])
@pytest.mark.parametrize(
    ("settings", "reward"), [({}, 0.0), ({"limit_reward": -0.5}, -0.5), ({"deadline_reward": -2.0}, -2.0)]
)
def test_a_deadline_of_the_policys_doing_completes_the_episode_with_its_reward(
    renderer: Renderer, workflow: type[RolloutWorkflow], settings: dict[str, float], reward: float
) -> None:
    played = workflow()
    for name, value in settings.items():
        setattr(played, name, value)
    trajectory = run_slowly(renderer, played)
    assert (trajectory.stop_reason, trajectory.final_reward, trajectory.failure) == (StopReason.DEADLINE, reward, None)
    assert len(trajectory.turns) == (33 if workflow is Stubborn else 17)


def test_a_final_reward_that_the_workflow_has_set_stays(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        client.reward_final(0.25)
        return await Stubborn().run(task, client)

    assert run_slowly(renderer, workflow_of(run)).final_reward == 0.25


@tool
async def stuck() -> str:
    """Never answer."""
    await anyio.sleep_forever()
    return ""


async def in_a_tool(client: Client) -> None:
    await stuck.reply({"id": "1", "function": {"name": "stuck", "arguments": "{}"}})


async def in_an_environment(client: Client) -> None:
    with environment_boundary("the simulator"):
        await anyio.sleep_forever()


class AsleepSandbox:
    """Never ends a program."""

    name, is_isolated = "asleep", True
    limits = Limits()

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        await anyio.sleep_forever()
        raise AssertionError

    def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None, port: int | None = None
    ) -> AbstractAsyncContextManager[Session]:
        raise NotImplementedError

    def forks(self, *, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        raise NotImplementedError


async def in_a_sandbox(client: Client) -> None:
    await SandboxPool(AsleepSandbox()).run(Program(argv=("true",)))


async def in_a_worker_process(client: Client) -> None:
    await cassette_ask("process", "grade", None, anyio.sleep_forever)


async def after_a_caught_fault(client: Client) -> None:
    with suppress(EnvironmentFault), environment_boundary("the simulator"):
        raise EnvironmentFault("the simulator is gone")
    await anyio.sleep_forever()


async def in_a_call(client: Client) -> None:
    await ask(client, "and now?")


async def after_a_failed_call(client: Client) -> None:
    with suppress(ServerError):
        await ask(client, "and now?")
    await anyio.sleep_forever()


@pytest.mark.parametrize(
    ("wait", "turns", "fault"),
    [
        (in_a_tool, 31, None),
        (in_an_environment, 31, None),
        (in_a_sandbox, 31, None),
        (in_a_worker_process, 31, None),
        (after_a_caught_fault, 31, None),
        (in_a_call, 25, Fault.HANG),
        (after_a_failed_call, 31, Fault.REFUSE),
    ],
)
def test_a_deadline_that_something_else_runs_into_is_a_failure(
    renderer: Renderer, wait: Callable[[Client], Awaitable[None]], turns: int, fault: Fault | None
) -> None:
    async def run(task: Task, client: Client) -> float:
        for _ in range(turns):
            await ask(client, "what now?")
        await wait(client)
        return 1.0

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="loop", fault=fault if call.turn == turns else None)

    trajectory = run_slowly(renderer, workflow_of(run), script=script)
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.DEADLINE, None)
    assert trajectory.failure is not None
    assert len(trajectory.turns) == turns


def test_a_call_that_is_cut_off_is_the_servers_doing_where_calls_take_over_a_tenth_of_the_deadline(
    renderer: Renderer,
) -> None:
    def slow_once(call: int) -> float:
        return 30.0 if call == 2 else 0.7

    paces = {"quick": each(9.0), "slow": each(11.0), "slow once": slow_once}
    failed = {name: run_slowly(renderer, Stubborn(), pace=pace).failure is not None for name, pace in paces.items()}
    assert failed == {"quick": False, "slow": True, "slow once": True}


async def wait_after(client: Client, turns: int, seconds: float) -> None:
    """Take turns of 3 s, wait, and take turns until the deadline."""
    for _ in range(turns):
        await ask(client, "loop or stop?")
    await anyio.sleep(seconds)
    await Stubborn().run(TASK, client)


@pytest.mark.parametrize(
    ("turns", "seconds", "num_turns"),
    [
        (1, 1000.0, 1),  # the workflow hangs after a turn
        (29, 1000.0, 29),  # it hangs in the last eighth, after turns for most of the time
        (0, 95.0, 1),  # a slow wait, and the deadline falls into a short call after it
        (10, 51.0, 16),  # the wait takes more than half of the time
    ],
)
def test_a_deadline_is_the_workflows_doing_where_turns_took_less_than_half_of_it_or_had_stopped(
    renderer: Renderer, turns: int, seconds: float, num_turns: int
) -> None:
    async def run(task: Task, client: Client) -> float:
        await wait_after(client, turns, seconds)
        return 1.0

    trajectory = run_slowly(renderer, workflow_of(run))
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.DEADLINE, None)
    assert trajectory.failure is not None
    assert len(trajectory.turns) == num_turns


def test_a_slow_wait_that_ends_before_half_of_the_deadline_leaves_it_to_the_policy(renderer: Renderer) -> None:
    async def run(task: Task, client: Client) -> float:
        await wait_after(client, 5, 40.0)
        return 1.0

    trajectory = run_slowly(renderer, workflow_of(run))
    assert (trajectory.stop_reason, trajectory.failure) == (StopReason.DEADLINE, None)


async def loop_beside(work: Callable[[], Awaitable[None]], client: Client) -> float:
    """Take turns for ever, and have outside work done at the same time."""

    async def do_work() -> None:
        with environment_boundary("the simulator"):
            await work()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(do_work)
        await Stubborn().run(TASK, client)
    return 1.0


async def shielded_until_after_the_deadline() -> None:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(DEADLINE_S + 1)


def test_outside_work_that_ends_normally_after_the_deadline_has_run_into_it(renderer: Renderer) -> None:
    trajectory = run_slowly(renderer, workflow_of(lambda _, client: loop_beside(shielded_until_after_the_deadline, client)))
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.DEADLINE, None)


@pytest.mark.parametrize("shield", [True, False])
def test_outside_work_that_begins_after_the_deadline_such_as_a_close_has_not_run_into_it(
    renderer: Renderer, shield: bool
) -> None:
    async def run(task: Task, client: Client) -> float:
        try:
            return await Stubborn().run(task, client)
        finally:
            with anyio.CancelScope(shield=shield), environment_boundary("the simulator"):
                await anyio.sleep(1)

    trajectory = run_slowly(renderer, workflow_of(run))
    assert (trajectory.stop_reason, trajectory.failure) == (StopReason.DEADLINE, None)


def test_a_replay_ends_at_the_deadline_of_the_record_with_its_reward(renderer: Renderer) -> None:
    class Paid(Stubborn):
        deadline_reward = -2.0

    recorded = run_slowly(renderer, Paid())
    replayed: list[Trajectory] = []

    async def main() -> None:
        replayed.append(await run_client_episode(Paid(), TASK, Client(ReplayBackend(recorded)), timeout_s=10 * DEADLINE_S))

    in_virtual_time(main)
    assert (replayed[0].stop_reason, replayed[0].final_reward) == (StopReason.DEADLINE, -2.0)
    assert len(replayed[0].turns) == len(recorded.turns)
