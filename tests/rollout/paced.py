"""Episodes in virtual time, with a deadline of 100 s, against a server whose calls take a time of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import anyio

from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import Script, ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.types import Trajectory
from agentrl.workflow import RolloutWorkflow
from tests.rollout.harness import SAMPLING, TASK, says
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
