"""`agentrl eval`: a workflow on held-out tasks, against a checkpoint or any OpenAI-compatible endpoint.

Invariant: nothing is trained; every episode asked for is counted, failed ones as no success.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.config import RunConfig
from agentrl.engine.evaluate import EvalReport, evaluate, evaluate_with
from agentrl.errors import ConfigError
from agentrl.inference.launch import launch_pool
from agentrl.launch.local import load_renderer, write_json
from agentrl.launch.tasks import load_tasks
from agentrl.rollout.episode import run_endpoint_episode
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow, load_workflow


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What to evaluate: the endpoint if there is one, else the checkpoint, else the run's own model."""

    checkpoint: Path | None = None
    endpoint: str | None = None
    model: str | None = None
    api_key_env: str = "OPENAI_API_KEY"


async def evaluate_target(
    run: RunConfig, target: Target, *, episodes: int | None = None, greedy: bool = False, output: Path | None = None
) -> EvalReport:
    """Evaluate behind a progress bar, print the result, and write it to `output`.

    Raises:
        ConfigError: there are no held-out tasks, or the target cannot be used.
        ServerError: no server could be started or reached.

    Cancellation: episodes and servers are ended; nothing is printed.
    """
    if run.inference.urls and target.checkpoint is not None and target.endpoint is None:
        raise ConfigError(
            f"--checkpoint {target.checkpoint}: inference.urls names running servers, which sample from their own weights; "
            "drop --checkpoint, or override --inference.urls '[]'"
        )
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}; make it first")
    tasks = load_tasks(run.tasks).evaluation
    if not tasks:
        raise ConfigError("tasks: there are no held-out tasks; set tasks.eval_path or tasks.eval_factory_args")
    workflow = load_workflow(run.workflow, run.workflow_args)
    count = episodes or run.engine.eval_episodes
    with _bar(count) as advance:
        if target.endpoint is not None:
            report = await _at_endpoint(run, target, workflow, tasks, count, greedy, advance)
        else:
            report = await _at_checkpoint(
                run, target.checkpoint or Path(run.model.path), workflow, tasks, count, greedy, advance
            )
    values = report.metrics()
    for name, value in values.items():
        print(f"{name:<24} {value:.4g}" if isinstance(value, float) else f"{name:<24} {value}")
    if output is not None:
        write_json(output, {"run": run.name, "target": _name(run, target), **values})
    return report


def _name(run: RunConfig, target: Target) -> str:
    if target.endpoint is not None:
        return target.endpoint
    return ", ".join(run.inference.urls) or str(target.checkpoint or run.model.path)


class _bar:
    """A progress bar on standard error when that is a terminal."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("episodes", total=total)

    def __enter__(self) -> Callable[[Trajectory], None]:
        self._progress.start()
        return lambda _episode: self._progress.advance(self._task)

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()


async def _at_checkpoint(
    run: RunConfig,
    checkpoint: Path,
    workflow: RolloutWorkflow,
    tasks: tuple[Task, ...],
    episodes: int,
    greedy: bool,
    on_episode: Callable[[Trajectory], None],
) -> EvalReport:
    renderer = load_renderer(run, checkpoint)
    log_dir = Path(run.runs_dir) / "eval-logs"
    async with launch_pool(
        run.resolved_inference, model_path=checkpoint, vocab_size=renderer.vocab_size, seed=run.seed, log_dir=log_dir
    ) as pool:
        return await evaluate(
            workflow,
            tasks,
            backend=pool,
            renderer=renderer.within(pool.max_context_tokens),
            rollout=run.rollout,
            sampling=run.sampling,
            episodes=episodes,
            greedy=greedy,
            on_episode=on_episode,
        )


async def _at_endpoint(
    run: RunConfig,
    target: Target,
    workflow: RolloutWorkflow,
    tasks: tuple[Task, ...],
    episodes: int,
    greedy: bool,
    on_episode: Callable[[Trajectory], None],
) -> EvalReport:
    from openai import AsyncOpenAI

    sampling = run.sampling.model_copy(update={"temperature": 0.0}) if greedy else run.sampling
    key = os.environ.get(target.api_key_env, "none")  # local endpoints take any key, and the openai client demands one
    async with AsyncOpenAI(base_url=target.endpoint, api_key=key, timeout=run.inference.request_timeout_s) as endpoint:
        return await evaluate_with(
            partial(
                run_endpoint_episode,
                workflow,
                endpoint=endpoint,
                model=target.model or "",
                rollout=run.rollout,
                sampling=sampling,
            ),
            tasks,
            max_concurrent=run.rollout.max_concurrent_episodes,
            episodes=episodes,
            greedy=greedy,
            on_episode=on_episode,
        )
