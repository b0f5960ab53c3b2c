"""The trial of `agentrl doctor`: a few episodes of a run, and what they tell of it before it starts.

Invariant: a trial trains nothing and writes no record. Its times are of this machine with nothing else of the run beside.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import anyio
import numpy as np

from agentrl.config import RunConfig
from agentrl.data.load import TaskSets
from agentrl.episode.summary import is_success, is_truncated
from agentrl.errors import WorkflowError
from agentrl.inference.launch.pool import launch_pool
from agentrl.observe.progress import duration_text
from agentrl.plan.plan import plan_run
from agentrl.rollout.episode import run_policy_episode
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow

EPISODES: Final = 8
"""Episodes of a trial."""
_PASSES: Final = 4
"""A training step in forward passes: one for proximal log-probs, and one with its gradient, which costs twice as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The episodes of a trial, none of which failed."""

    episodes: tuple[Trajectory, ...]
    seconds: float
    """From the start of the first to the end of the last; those within `rollout.max_concurrent_episodes` run together."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all episodes."""
        return sum(episode.num_output_tokens for episode in self.episodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedTrainer:
    """The trainer of a run, which was started once."""

    num_parameters: int
    device: str
    forward_s: float | None
    """Seconds of a forward pass over the episodes of a trial; None without one."""


async def play_trial(run: RunConfig, tasks: TaskSets, workflow: RolloutWorkflow, renderer: Renderer) -> Trial:
    """Start or attach to the servers, and play `EPISODES` episodes of the first tasks.

    Raises:
        WorkflowError: an episode failed.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as logs:
        serving = launch_pool(
            run.resolved_inference,
            model_path=run.model.directory,
            vocab_size=renderer.vocab_size,
            seed=run.seed,
            log_dir=logs,
        )
        played: list[Trajectory] = []
        slots = anyio.Semaphore(min(EPISODES, run.rollout.max_concurrent_episodes))
        async with serving as pool, workflow.opened():
            within = renderer.within(pool.max_context_tokens)

            async def play(task: Task) -> None:
                async with slots:
                    episode = await run_policy_episode(
                        workflow,
                        task,
                        backend=pool,
                        renderer=within,
                        rollout=run.rollout,
                        sampling=run.sampling,
                        seed=run.seed,
                    )
                    pool.release(episode.episode_id)
                    played.append(episode)

            begin = time.perf_counter()
            async with task_group() as episodes:
                for task in islice(cycle(tasks.train.first(EPISODES)), EPISODES):
                    episodes.start_soon(play, task)
            seconds = time.perf_counter() - begin
    failed = [(episode.stop_reason, episode.failure.message) for episode in played if episode.failure is not None]
    if failed:
        reason, message = failed[0]
        raise WorkflowError(f"{len(failed)} of {len(played)} episodes failed, the first one so ({reason}): {message}")
    return Trial(episodes=tuple(played), seconds=seconds)


async def start_trainer(run: RunConfig, trial: Trial | None) -> StartedTrainer:
    """Start the trainer worker, let it load the model and read the episodes of a trial, and end it."""
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as logs:
        async with launch_trainer(
            plan_run(run).run.trainer,
            run.algorithm,
            model_path=run.model.directory,
            total_steps=run.engine.steps,
            seed=run.seed,
            log_path=Path(logs) / "trainer.log",
            sync=run.route.sync,
        ) as trainer:
            forward_s = None if trial is None else await _timed_pass(trainer, trial.episodes)
            return StartedTrainer(num_parameters=trainer.num_parameters, device=str(trainer.device), forward_s=forward_s)


async def _timed_pass(trainer: RemoteTrainer, episodes: Sequence[Trajectory]) -> float | None:
    """Return the seconds of a forward pass over the branches of `episodes`; the pass before it warms the trainer up."""
    branches = [branch.token_ids for episode in episodes for branch in episode.branches() if len(branch.token_ids) > 1]
    if not branches:
        return None
    await trainer.logprobs(branches[:1])
    begin = time.perf_counter()
    await trainer.logprobs(branches)
    return time.perf_counter() - begin


def describe_trial(trial: Trial) -> str:
    """Return success, return, turns, truncation, entropy and speed of a trial as a line."""
    episodes = trial.episodes
    share = len(episodes)
    turns = [turn for episode in episodes for turn in episode.turns]
    sampled = [-turn.output_logprobs for turn in turns if turn.temperature > 0]
    # The mean surprise of sampled tokens is an estimate of the policy's entropy, without bias where nothing is truncated.
    surprise = np.concatenate([np.empty(0, np.float32), *sampled])
    parts = [
        f"{share} episodes: success {sum(map(is_success, episodes))} of {share}",
        f"return {np.mean([episode.episode_return for episode in episodes]):g}",
        f"{sum(map(is_truncated, episodes))} cut by a limit",
        f"{len(turns) / share:.1f} turns and {trial.num_tokens / share:.0f} tokens each",
        f"entropy {surprise.mean():.3g} nats a token" if len(surprise) else "entropy 0 (greedy: nothing is trained)",
    ]
    if trial.seconds > 0:
        parts.append(f"{trial.num_tokens / trial.seconds:.0f} tokens/s")
    return ", ".join(parts)


def describe_trainer(run: RunConfig, started: StartedTrainer, trial: Trial | None) -> str:
    """Return the trainer and, after a trial, the time of a step as a line."""
    trainer = f"{started.num_parameters} parameters on {started.device}"
    if trial is None or started.forward_s is None or trial.seconds <= 0:
        return trainer
    batches = run.algorithm.groups_per_step * run.algorithm.group_size / len(trial.episodes)
    passes = _PASSES + run.trainer.gradient_checkpointing
    sampling, training = math.ceil(batches * trial.seconds), math.ceil(batches * passes * started.forward_s)
    return (
        f"{trainer}; a step of {run.algorithm.groups_per_step * run.algorithm.group_size} episodes: at most about "
        f"{duration_text(sampling)} of sampling and about {duration_text(training)} of training"
    )
