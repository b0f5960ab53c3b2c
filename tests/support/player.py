"""Plays a bundled workflow against a scripted server, inside its `opened`, on the real sandbox and graders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import anyio
from tokenizers import Tokenizer

from agentrl.client.config import SamplingConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow

PATIENCE_S = 300.0


def tool_call(name: str, **arguments: object) -> str:
    """Return the text of one call, as a model with the markup of the tiny tokenizer writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Player:
    """Plays episodes of a workflow, each on a script of its own: one text for each model call."""

    def __init__(self, folder: Path, renderer: Renderer) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.renderer = renderer

    async def __call__(self, workflow: RolloutWorkflow, task: Task, *texts: str) -> Trajectory:
        [episode] = await self.all(workflow, task, texts)
        return episode

    async def all(
        self, workflow: RolloutWorkflow, task: Task, *scripts: Sequence[str], max_tokens: int = 8192
    ) -> list[Trajectory]:
        """Play an episode for each script, one after the other, within one `opened`."""
        with anyio.fail_after(PATIENCE_S):
            async with workflow.opened():
                return [await self._episode(workflow, task, script, max_tokens) for script in scripts]

    async def _episode(self, workflow: RolloutWorkflow, task: Task, script: Sequence[str], max_tokens: int) -> Trajectory:
        server = ScriptedServer.from_texts(
            lambda text: self.tokenizer.encode(text, add_special_tokens=False).ids,
            script,
            vocab_size=self.renderer.vocab_size,
            eos_id=self.renderer.end_of_turn_id,
        )
        return await run_policy_episode(
            workflow,
            task,
            backend=server,
            renderer=self.renderer,
            rollout=RolloutConfig(episode_timeout_s=PATIENCE_S),
            sampling=SamplingConfig(max_tokens=max_tokens),
        )

    def read(self, trajectory: Trajectory) -> list[str]:
        """Return what the model read before each call, as text, without what it had read before."""
        return [self.renderer.decode(turn.context_ids, skip_special=False) for turn in trajectory.turns]
