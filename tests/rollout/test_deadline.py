"""A deadline that the policy reaches by taking turns is a limit; one that something else runs into is a failure."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

import anyio
import pytest

from agentrl.algo.advantage import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.cassette.tape import ask as cassette_ask
from agentrl.client import Client
from agentrl.client.replay import ReplayClient
from agentrl.env.faults import environment_boundary
from agentrl.errors import EnvironmentFault, ServerError
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_client_episode, run_policy_episode
from agentrl.rollout.group import run_group
from agentrl.sandbox.pool import SandboxPool
from agentrl.sandbox.session import Session
from agentrl.sandbox.types import Limits, Program, Result
from agentrl.servers.scripted.server import Fault, Script, ScriptedCall, ScriptedReply, ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tools import tool
from agentrl.types import Group, StopReason, Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from tests.rollout.harness import SAMPLING, TASK, ask, says, workflow_of
from tests.support.scripted import in_virtual_time

DEADLINE_S = 100.0


class Paced(ScriptedServer):
    """Takes a time for each call, which `pace` gives from the number of the call."""

    def __init__(self, renderer: Renderer, script: Script, pace: Callable[[int], float]) -> None:
        [eos] = renderer.eos_ids
        super().__init__(
            script, vocab_size=renderer.vocab_size, encode=renderer.encode_content, eos_id=eos, timeout_s=10 * DEADLINE_S
        )
        self._pace, self._count = pace, itertools.count()

    async def generate(self, request: GenerateRequest) -> Generation:
        await anyio.sleep(self._pace(next(self._count)))
        return await super().generate(request)


class Stubborn(RolloutWorkflow):
    """Asks until the policy stops; 1 for stopping."""

    async def run(self, task: Task, client: Client) -> float:
        while await ask(client, "loop or stop?") != "stop":
            pass
        return 1.0


def each(seconds: float) -> Callable[[int], float]:
    return lambda call: seconds


def run_slowly(
    renderer: Renderer,
    workflow: RolloutWorkflow,
    *,
    script: Script = says("loop"),  # noqa: B008 - a pure function
    pace: Callable[[int], float] = each(3.0),  # noqa: B008 - a pure function
) -> Trajectory:
    """Run one episode with a deadline of 100 s against a server whose calls take as long as `pace` says."""
    ended: list[Trajectory] = []

    async def main() -> None:
        ended.append(
            await run_policy_episode(
                workflow,
                TASK,
                backend=Paced(renderer, script, pace),
                renderer=renderer,
                rollout=RolloutConfig(episode_timeout_s=DEADLINE_S),
                sampling=SAMPLING,
            )
        )

    in_virtual_time(main)
    return ended[0]


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


class Thinker(Stubborn):
    """Takes a turn, and then never another one."""

    async def run(self, task: Task, client: Client) -> float:
        await ask(client, "what now?")
        await anyio.sleep_forever()
        return 1.0


@pytest.mark.parametrize("workflow", [Stubborn, Thinker])
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
    assert len(trajectory.turns) == (33 if workflow is Stubborn else 1)


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
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> AbstractAsyncContextManager[Session]:
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
    ("wait", "second"),
    [
        (in_a_tool, "loop"),
        (in_an_environment, "loop"),
        (in_a_sandbox, "loop"),
        (in_a_worker_process, "loop"),
        (after_a_caught_fault, "loop"),
        (in_a_call, Fault.HANG),
        (after_a_failed_call, Fault.REFUSE),
    ],
)
def test_a_deadline_that_something_else_runs_into_is_a_failure(
    renderer: Renderer, wait: Callable[[Client], Awaitable[None]], second: str | Fault
) -> None:
    async def run(task: Task, client: Client) -> float:
        await ask(client, "what now?")
        await wait(client)
        return 1.0

    def script(call: ScriptedCall) -> ScriptedReply:
        return ScriptedReply(output="loop", fault=second if call.turn and isinstance(second, Fault) else None)

    trajectory = run_slowly(renderer, workflow_of(run), script=script)
    assert (trajectory.stop_reason, trajectory.final_reward) == (StopReason.DEADLINE, None)
    assert trajectory.failure is not None
    assert len(trajectory.turns) == 1


def test_a_call_that_is_cut_off_is_the_servers_doing_where_calls_take_over_a_tenth_of_the_deadline(
    renderer: Renderer,
) -> None:
    def slow_once(call: int) -> float:
        return 30.0 if call == 2 else 0.7

    paces = {"quick": each(9.0), "slow": each(11.0), "slow once": slow_once}
    failed = {name: run_slowly(renderer, Stubborn(), pace=pace).failure is not None for name, pace in paces.items()}
    assert failed == {"quick": False, "slow": True, "slow once": True}


def test_a_replay_ends_at_the_deadline_of_the_record_with_its_reward(renderer: Renderer) -> None:
    class Paid(Stubborn):
        deadline_reward = -2.0

    recorded = run_slowly(renderer, Paid())
    replayed: list[Trajectory] = []

    async def main() -> None:
        replayed.append(await run_client_episode(Paid(), TASK, ReplayClient(recorded), timeout_s=10 * DEADLINE_S))

    in_virtual_time(main)
    assert (replayed[0].stop_reason, replayed[0].final_reward) == (StopReason.DEADLINE, -2.0)
    assert len(replayed[0].turns) == len(recorded.turns)
