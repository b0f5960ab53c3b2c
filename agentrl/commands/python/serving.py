"""`agentrl.serve`: a checkpoint behind a server, for the length of an `async with` block.

Invariant: the server has ended when the block is left. What `run`, `evaluate` and `client` record are exact token ids.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from agentrl.client import Client, EpisodeSettings, PolicyBackend
from agentrl.commands.evaluate import EpisodeBar
from agentrl.commands.python.arguments import GivenTasks, given_workflow, nested_fields, one_task_set, set_field
from agentrl.commands.train import load_renderer
from agentrl.config import RunConfig, parse_config
from agentrl.engine.evaluate import EvalReport, evaluate_policy
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.pool.pool import ServerPool
from agentrl.rollout.episode import run_policy_episode
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Trajectory


class ServedPolicy:
    """A checkpoint that is being served."""

    def __init__(self, config: RunConfig, pool: ServerPool, renderer: Renderer) -> None:
        self._config = config
        self._pool = pool
        self._renderer = renderer

    @property
    def url(self) -> str:
        """Base URL of the server; of the first, where there are several."""
        return self._pool.serving[0]

    def client(self, task_id: str = "client", *, seed: int | None = None) -> Client:
        """Return a client of a new episode: an `AsyncOpenAI` that records exact token ids; `close(...)` ends the episode.

        Args:
            task_id: the task that the trajectory is of.
            seed: of the model calls; None leaves it to the server.
        """
        settings = EpisodeSettings(
            episode_id=uuid4().hex,
            task_id=task_id,
            max_turns=self._config.rollout.max_turns,
            max_episode_tokens=self._config.rollout.max_episode_tokens,
        )
        return Client(PolicyBackend(self._pool, self._renderer, self._config.sampling, settings, seed=seed))

    async def run(
        self, workflow: object, task: Task | Mapping[str, Any], *, workflow_args: Mapping[str, Any] | None = None
    ) -> Trajectory:
        """Return the trajectory of one episode; a failed one has `failure` set.

        Raises:
            ConfigError: the workflow or the task cannot be used.

        Cancellation: ends the episode.
        """
        flow = given_workflow(workflow, workflow_args)
        [played] = one_task_set([task], "task")
        async with flow.opened():
            return await run_policy_episode(
                flow,
                played,
                backend=self._pool,
                renderer=self._renderer,
                rollout=self._config.rollout,
                sampling=self._config.sampling,
                seed=self._config.seed,
            )

    async def evaluate(
        self,
        workflow: object,
        tasks: GivenTasks,
        *,
        episodes: int | None = None,
        greedy: bool = False,
        workflow_args: Mapping[str, Any] | None = None,
    ) -> EvalReport:
        """Play a workflow on tasks and return the report, as `agentrl.evaluate` does.

        Raises:
            ConfigError: the workflow or a task cannot be used.

        Cancellation: ends the episodes.
        """
        played = one_task_set(tasks, "tasks")
        count = len(played) if episodes is None else episodes
        with EpisodeBar(count) as advance:
            return await evaluate_policy(
                given_workflow(workflow, workflow_args),
                played,
                backend=self._pool,
                renderer=self._renderer,
                rollout=self._config.rollout,
                sampling=self._config.sampling,
                episodes=count,
                greedy=greedy,
                seed=self._config.seed,
                on_episode=advance,
            )


@asynccontextmanager
async def serve(checkpoint: str | Path, **overrides: object) -> AsyncGenerator[ServedPolicy]:
    """Serve a checkpoint on this machine: `async with agentrl.serve("runs/a/checkpoints/step-000060") as policy`.

    Args:
        checkpoint: local HF checkpoint, or an `hf://` name in the cache of the hub.
        **overrides: fields of a run file, such as `inference={"device": "cpu"}`, `sampling__max_tokens=64` or `seed=3`.

    Raises:
        ConfigError: before anything is started; one line for each error, with the field and the fix.
        ServerError: the server did not start; the message has the reason and the end of its log.

    Cancellation: ends the server within 5 seconds.
    """
    fields = nested_fields("agentrl.serve", overrides)
    for path, value in (("model.path", str(checkpoint)), ("workflow", "<agentrl.serve>"), ("tasks.path", "<agentrl.serve>")):
        set_field("agentrl.serve", fields, path, value)
    config = parse_config(fields, source="agentrl.serve")
    directory = config.model.directory
    renderer = load_renderer(config, directory)
    with tempfile.TemporaryDirectory(prefix="agentrl-serve-") as logs:
        serving = launch_pool(
            config.resolved_inference,
            model_path=directory,
            vocab_size=renderer.vocab_size,
            seed=config.seed,
            log_dir=logs,
        )
        async with serving as pool:
            yield ServedPolicy(config, pool, renderer.within(pool.max_context_tokens))
