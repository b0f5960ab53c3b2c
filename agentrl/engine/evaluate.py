"""Evaluate a workflow: a fixed set of episodes, without training.

Invariant: each requested episode is run once and counted. A failed episode has no result: rates and returns are over the
other episodes, and the report counts the failed ones by reason. Where weights are frozen (`engine.eval_weights`), one policy
version samples all tokens of an evaluation.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio

from agentrl.client.config import SamplingConfig
from agentrl.data.digest import check_unique
from agentrl.engine.buffer import Signal
from agentrl.engine.diagnostics import speaker_metrics, task_outcomes
from agentrl.engine.inflight import release_episode
from agentrl.episode.summary import MetricValue, episode_metrics, is_success, prefixed, version_range
from agentrl.errors import ConfigError, InvariantError
from agentrl.inference.backend import Backend
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import LocalRunner, PolicyRunner
from agentrl.rollout.group import EpisodeRunner, cancelled_episode, run_recorded
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """The result of one evaluation."""

    episodes: tuple[Trajectory, ...]
    """In the order of the tasks; failed ones included."""
    seconds: float
    greedy: bool

    @property
    def success_rate(self) -> float | None:
        """Share of the episodes with a result that succeeded, by `is_success`; None when every episode failed."""
        done = [is_success(episode) for episode in self.episodes if episode.failure is None]
        return sum(done) / len(done) if done else None

    @property
    def failed(self) -> int:
        """Episodes without a result."""
        return sum(self.failures.values())

    @property
    def failures(self) -> Mapping[str, int]:
        """Episodes without a result, by stop reason, the most frequent first."""
        reasons = Counter(str(episode.stop_reason) for episode in self.episodes if episode.failure is not None)
        return dict(reasons.most_common())

    @property
    def first_failed(self) -> Trajectory | None:
        """The first failed episode in the order of the tasks; None when none failed."""
        return next((episode for episode in self.episodes if episode.failure is not None), None)

    @property
    def versions(self) -> tuple[int, int] | None:
        """Lowest and highest policy version that sampled a token; None for an endpoint, which does not report it."""
        return version_range(self.episodes)

    def check_frozen(self, version: int) -> None:
        """Raise `InvariantError` unless `version` sampled every token."""
        lowest, highest = self.versions or (version, version)
        if not lowest == highest == version:
            raise InvariantError(
                f"a frozen evaluation (engine.eval_weights) began at version {version}, which the servers must keep until "
                f"it ends, but versions {lowest} to {highest} sampled its tokens; does another process update these servers?"
            )

    @property
    def samples(self) -> Mapping[str, tuple[Trajectory, ...]]:
        """The episodes of each task, by its id, in the order of the tasks; failed ones included."""
        played: dict[str, list[Trajectory]] = {}
        for episode in self.episodes:
            played.setdefault(episode.task_id, []).append(episode)
        return {task_id: tuple(episodes) for task_id, episodes in played.items()}

    def metrics(self) -> dict[str, MetricValue]:
        """Return the keys of the `evaluation` event of `agentrl.episode.summary`."""
        versions = self.versions
        found: dict[str, MetricValue] = {
            **episode_metrics(self.episodes),
            **task_outcomes(self.samples.values()),
            **speaker_metrics(self.episodes),
            "failed": self.failed,
            **prefixed("failed_episodes", self.failures),
            "greedy": self.greedy,
            "seconds": self.seconds,
        }
        return found if versions is None else {**found, "min_version": versions[0], "max_version": versions[1]}


async def evaluate_policy(
    workflow: RolloutWorkflow,
    tasks: Sequence[Task],
    *,
    backend: Backend,
    renderer: Renderer,
    rollout: RolloutConfig,
    sampling: SamplingConfig,
    episodes: int | None = None,
    greedy: bool = False,
    seed: int | None = None,
    on_episode: Callable[[Trajectory], None] | None = None,
    runner: PolicyRunner | None = None,
) -> EvalReport:
    """Run `workflow` on `tasks` and return the report; nothing is retried.

    Tasks are taken in order, and again when `episodes` (None: one for each task) is larger than their number. With `greedy`
    the temperature is 0 where the workflow sets none. Without `seed` the servers choose seeds. Without `runner` the episodes
    run on the event loop of this process.

    Raises:
        ConfigError: there are no tasks, or `episodes` is below 1.
    """
    if greedy:
        sampling = sampling.model_copy(update={"temperature": 0.0})
    playing = runner or LocalRunner(workflow, renderer=renderer, rollout=rollout, seed=seed)

    async def run(task: Task, *, episode_id: str) -> Trajectory:
        try:
            return await playing.play(task, episode_id=episode_id, sampling=sampling, on_turn=lambda _: None)
        finally:
            release_episode(backend, episode_id)

    slots = rollout.max_concurrent_episodes
    async with playing.opened(backend):
        return await evaluate_with(run, tasks, max_concurrent=slots, episodes=episodes, greedy=greedy, on_episode=on_episode)


async def evaluate_with(
    run: EpisodeRunner,
    tasks: Sequence[Task],
    *,
    max_concurrent: int,
    slots: anyio.Semaphore | None = None,
    episodes: int | None = None,
    greedy: bool = False,
    name: str = "eval",
    on_episode: Callable[[Trajectory], None] | None = None,
) -> EvalReport:
    """Run episodes with any runner, such as `functools.partial(run_endpoint_episode, workflow, endpoint=..., ...)`.

    The rest is as for `evaluate_policy`. Each episode also holds one of `slots`, shared with other episodes. `greedy` is for
    the report alone: the runner decides how to sample. Episode ids begin with `name`.
    """
    check_unique(tasks, "the evaluation")
    count = len(tasks) if episodes is None else episodes
    if count < 1:
        raise ConfigError(f"episodes: expected at least 1, got {count}; leave it out for one of each task")
    results: dict[int, Trajectory] = {}
    own, shared = anyio.Semaphore(max_concurrent), slots or anyio.Semaphore(max_concurrent)
    begin = time.perf_counter()

    async def run_in_turn(task: Task, *, episode_id: str) -> Trajectory:
        async with own, shared:
            return await run(task, episode_id=episode_id)

    async def one(number: int) -> None:
        episode = await run_recorded(run_in_turn, tasks[number % len(tasks)], episode_id=f"{name}.{number}")
        results[number] = episode
        if on_episode is not None:
            on_episode(episode)

    async with task_group() as group:
        for number in range(count):
            group.start_soon(one, number)
    return EvalReport(
        episodes=tuple(
            results.get(number) or cancelled_episode(tasks[number % len(tasks)], f"{name}.{number}")
            for number in range(count)
        ),
        seconds=time.perf_counter() - begin,
        greedy=greedy,
    )


class EvaluationQueue:
    """The evaluations of a run, one after the other while it trains: at most one runs and one waits."""

    def __init__(
        self,
        evaluate: Callable[[int], Awaitable[EvalReport]],
        *,
        every: int,
        on_result: Callable[[int, EvalReport], Awaitable[None]],
        on_skip: Callable[[int], None],
        due: Sequence[int] = (),
        frozen: bool = False,
    ) -> None:
        """Start with the steps in `due`, each due until `on_result` returns; `on_skip` gets each step left out."""
        self._evaluate, self._every, self._on_result, self._on_skip = evaluate, every, on_result, on_skip
        self._due = list(due)
        self._changed, self._closed, self._holds = Signal(), False, frozen

    @property
    def due(self) -> tuple[int, ...]:
        """The steps whose evaluation has no result yet."""
        return tuple(self._due)

    def is_due(self, step: int) -> bool:
        """Return whether the run evaluates the weights of `step`."""
        return bool(self._every) and step % self._every == 0

    def request(self, step: int) -> None:
        """Ask for an evaluation if one is due after `step`."""
        if not self.is_due(step):
            return
        if len(self._due) > 1:
            self._on_skip(step)
            return
        self._due.append(step)
        self._changed.fire()

    async def released(self) -> None:
        """Return when servers may take new weights: at once, or when no frozen evaluation is due."""
        await self._changed.wait_until(
            lambda: not (self._holds and self._due), timeout_s=None, what=lambda: "the trainer waits for an evaluation"
        )

    def release(self) -> None:
        """Let servers take new weights from now on, because the evaluations that are due end without a result."""
        self._holds = False
        self._changed.fire()

    def close(self) -> None:
        """End `serve` after the evaluations that are due."""
        self._closed = True
        self._changed.fire()

    async def serve(self) -> None:
        """Evaluate on request until `close`; `released` waits no more when this ends.

        Cancellation: the present evaluation ends without a result, and stays due.
        """
        try:
            while True:
                await self._changed.wait_until(
                    lambda: self._closed or bool(self._due), timeout_s=None, what=lambda: "evaluations wait for a step"
                )
                if not self._due:
                    return
                step = self._due[0]
                await self._on_result(step, await self._evaluate(step))
                self._due.remove(step)
                self._changed.fire()
        finally:
            self.release()
