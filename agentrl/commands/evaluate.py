"""`agentrl eval`: a workflow on held-out tasks, against a checkpoint or any OpenAI-compatible endpoint.

Invariant: nothing is trained, and every episode that was asked for is counted. A failed episode has no result: rates
are over the other episodes, the first failure is printed, and too many failures are an error. The servers' logs stay
only after a failure.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.commands.rollouts import make_runner
from agentrl.commands.running import Overrides, check_writable, load_run, run_job
from agentrl.commands.train import load_renderer
from agentrl.config import RunConfig
from agentrl.data.load import load_held_out
from agentrl.data.playable import playable_held_out
from agentrl.engine.evaluate import EvalReport, evaluate_policy, evaluate_with
from agentrl.episode.summary import is_success
from agentrl.errors import ConfigError, ErrorBudgetExceeded, RunStopped
from agentrl.inference.config import has_credentials
from agentrl.inference.launch.pool import launch_pool
from agentrl.processes.watchdog.delays import tuned_garbage_collector
from agentrl.rollout.episode import run_endpoint_episode
from agentrl.support.files import write_json
from agentrl.types import StopReason, Task, Trajectory
from agentrl.weights.merging import whole_model
from agentrl.workflow import RolloutWorkflow, load_workflow

_KEY_VARIABLE = "OPENAI_API_KEY"
_CAUSES = "\nThe above exception was the direct cause of the following exception:\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target of an evaluation: the endpoint, or else the checkpoint, or else the run's own model."""

    checkpoint: Path | None = None
    endpoint: str | None = None
    model: str | None = None
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """Environment variable with the endpoint's key; None: `OPENAI_API_KEY` where it is set, or else no key."""


def command_target(checkpoint: Path | None, endpoint: str | None, model: str | None, api_key_env: str | None) -> Target:
    """Return the target that the flags of a command name.

    Raises:
        ConfigError: flags exclude each other, or one is missing.
    """
    if endpoint is not None and checkpoint is not None:
        raise ConfigError("--checkpoint and --endpoint exclude each other; pass only one of them")
    if endpoint is not None and model is None:
        raise ConfigError("--endpoint needs --model, the name of the model at the endpoint")
    checkpoint = None if checkpoint is None else whole_model(checkpoint)
    return Target(checkpoint=checkpoint, endpoint=endpoint, model=model, api_key_env=api_key_env)


def eval_command(
    config: Path,
    /,
    *overrides: Overrides,
    checkpoint: Path | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    episodes: int | None = None,
    samples: int | None = None,
    greedy: bool = False,
    output: Path | None = None,
) -> None:
    """Run the workflow on the held-out tasks and report success, without training.

    The success rate is over the episodes that did not fail. The exit status is 1 if all failed, or more than
    rollout.max_failure_rate of them.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        checkpoint: HF checkpoint to serve and evaluate; the default without --endpoint is the file's model.path.
        endpoint: Base URL of an OpenAI-compatible endpoint to evaluate instead, such as http://127.0.0.1:8000/v1.
        model: Name of the model at the endpoint.
        api_key_env: Environment variable with the endpoint's key; the default is OPENAI_API_KEY, if that is set.
        episodes: Number of episodes; the default is engine.eval_episodes, or with --samples that many of every task.
        samples: Play each task so many times, and report pass@k and the success of the majority's answer.
        greedy: Sample at temperature 0.
        output: File to write the report to, as JSON.
    """
    target = command_target(checkpoint, endpoint, model, api_key_env)
    run = load_run(config, overrides)
    job = partial(evaluate_target, run, target, episodes=episodes, samples=samples, greedy=greedy, output=output)
    run_job(job, lambda: "An interrupted evaluation has no results.", stall_timeout_s=run.engine.stall_timeout_s)


async def evaluate_target(
    run: RunConfig,
    target: Target,
    *,
    episodes: int | None = None,
    samples: int | None = None,
    greedy: bool = False,
    output: Path | None = None,
) -> EvalReport:
    """Evaluate behind a progress bar, print the result, and write it to `output` even when too many episodes failed.

    `samples` is as for `choose_samples`; `output` then lists which episodes are of one task.

    Raises:
        ConfigError: there are no held-out tasks, or the target or a flag cannot be used.
        ServerError: no server could be started or reached.
        ErrorBudgetExceeded: all episodes failed, or more than `rollout.max_failure_rate` of them; carries the first failure.
        RunStopped: `output` can no longer be written; the result is printed.

    Cancellation: ends episodes and servers; nothing is printed.
    """
    key = check_target(run, target, episodes)
    if output is not None:
        _check_output(output)
    tasks = load_held_out(run.tasks)
    if not tasks:
        raise ConfigError("tasks: there are no held-out tasks; set tasks.eval")
    workflow = load_workflow(run.workflow, run.workflow_args)
    tasks = playable_held_out(tasks, run.tasks, workflow.refusal)
    if samples is None:
        count = run.engine.eval_episodes if episodes is None else episodes
    else:
        tasks, count = choose_samples(tasks, episodes, samples, greedy=greedy)
    with server_logs(run) as logs:
        report = await play_episodes(run, target, key, logs, workflow, tasks, count, greedy)
        _show(report)
        values = {"run": run.name, "target": _name(run, target), **_values(report)}
        values |= {} if samples is None else {"samples": _samples_by_task(report)}
        unsaved = "" if output is None else _save(output, values)
        if unsaved and report.failed:
            print(unsaved, file=sys.stderr)  # now, because `_report_failures` may raise
        _report_failures(run, report)
    if unsaved:
        raise RunStopped(unsaved)
    return report


class EpisodeBar:
    """A progress bar on standard error when that is a terminal; entering it returns what to call with each episode."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("episodes", total=total)

    def __enter__(self) -> Callable[[Trajectory], None]:
        self._progress.start()
        return self._advance

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):
            self._progress.stop()

    def _advance(self, _episode: Trajectory) -> None:
        with suppress(OSError):  # a terminal that is gone does not end the command
            self._progress.advance(self._task)


async def play_episodes(
    run: RunConfig,
    target: Target,
    key: str,
    logs: ServerLogs,
    workflow: RolloutWorkflow,
    tasks: Sequence[Task],
    count: int,
    greedy: bool,
    on_episode: Callable[[Trajectory], None] = lambda _: None,
) -> EvalReport:
    """Play `count` episodes against the target behind a progress bar and return the report; `key` is of `check_target`.

    `on_episode` is called with each episode as it ends.

    Raises:
        ConfigError: the workflow refuses a task.
        ServerError: no server could be started or reached.

    Cancellation: ends episodes and servers.
    """
    workflow.check_tasks(tasks)
    with EpisodeBar(count) as advance:

        def tell(episode: Trajectory) -> None:
            advance(episode)
            on_episode(episode)

        if target.endpoint is not None:
            report = await _at_endpoint(run, target, key, workflow, tasks, count, greedy, tell)
        else:
            report = await _at_checkpoint(run, target, logs, workflow, tasks, count, greedy, tell)
    logs.wanted = report.failed > 0
    return report


def choose_samples(tasks: Sequence[Task], episodes: int | None, samples: int, *, greedy: bool) -> tuple[Sequence[Task], int]:
    """Return the tasks that are played `samples` times each, and the number of episodes that makes.

    Raises:
        ConfigError: the numbers do not fit together, or greedy samples were asked for.
    """
    if samples < 1:
        raise ConfigError(f"--samples {samples}: expected at least 1; omit it for one sample of each task")
    if greedy and samples > 1:
        raise ConfigError(
            f"--samples {samples} --greedy: at temperature 0 the samples of a task are alike; drop one of the two"
        )
    count = len(tasks) * samples if episodes is None else episodes
    if count % samples or count > len(tasks) * samples:
        raise ConfigError(
            f"--episodes {count} --samples {samples}: expected a multiple of {samples}, at most {len(tasks) * samples} for "
            f"the {len(tasks)} tasks; omit --episodes for all of them"
        )
    return tasks[: count // samples], count


def check_target(run: RunConfig, target: Target, episodes: int | None) -> str:
    """Check what is to be evaluated, and return the endpoint's key.

    Raises:
        ConfigError: settings of the target exclude each other, or its key is missing.
    """
    if run.inference.urls and target.checkpoint is not None and target.endpoint is None:
        raise ConfigError(
            f"--checkpoint {target.checkpoint}: inference.urls names running servers, which sample from their own weights; "
            "drop --checkpoint, or override --inference.urls '[]'"
        )
    if target.endpoint is not None and has_credentials(target.endpoint):
        raise ConfigError(
            "--endpoint holds a user or a password, which messages would show; name the key by "
            "--api-key-env (in Python: endpoint=, api_key_env=)"
        )
    if target.endpoint is None and target.api_key_env is not None:
        raise ConfigError(
            f"--api-key-env {target.api_key_env}: needs --endpoint, which is missing; inference.api_key_env names "
            "the key of the run's own servers (in Python: endpoint=, api_key_env=)"
        )
    if target.endpoint is None and target.model is not None:
        raise ConfigError(f"--model {target.model}: needs --endpoint, which is missing; pass a local model as --checkpoint")
    if target.endpoint is not None and run.rollout.runner != "local":
        raise ConfigError(
            f"rollout.runner: {run.rollout.runner}: workers play episodes of the policy, and those of an endpoint run in "
            "this process; override --rollout.runner local"
        )
    if episodes is not None and episodes < 1:
        raise ConfigError(
            f"--episodes {episodes}: expected at least 1; omit it for engine.eval_episodes = {run.engine.eval_episodes}, or "
            "in Python (episodes=) for one of each task"
        )
    key = os.environ.get(target.api_key_env or _KEY_VARIABLE)
    if target.api_key_env is not None and not key:
        raise ConfigError(
            f"--api-key-env {target.api_key_env}: this environment variable is not set; export it, or drop the flag for an "
            "endpoint that takes any key"
        )
    return key or "none"  # local endpoints take any key, and the openai client demands one


def _check_output(output: Path) -> None:
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}; create it first")
    check_writable(output, f"--output {output}")
    if output.exists() and not output.is_file():
        kind = "a directory" if output.is_dir() else "not a file"
        raise ConfigError(f"--output {output}: expected the name of a file to write, but it is {kind}; name another")


def _name(run: RunConfig, target: Target) -> str:
    if target.endpoint is not None:
        return target.endpoint
    return ", ".join(run.inference.urls) or str(target.checkpoint or run.model.path)


def _show(report: EvalReport) -> None:
    values = report.metrics()
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}} {value:.4g}" if isinstance(value, float) else f"{name:<{width}} {value}")


def _values(report: EvalReport) -> dict[str, Any]:
    """Return the metrics and the first failure (null where there is none)."""
    first = report.first_failed
    failure = None
    if first is not None and first.failure is not None:
        failure = {
            "episode_id": first.episode_id,
            "task_id": first.task_id,
            "stop_reason": str(first.stop_reason),
            "kind": first.failure.kind,
            "message": first.failure.message,
        }
    return {**report.metrics(), "first_failure": failure}


def _samples_by_task(report: EvalReport) -> list[dict[str, Any]]:
    """Return, for each task, its episodes: whether each succeeded (null where it failed), and its answer."""
    return [
        {
            "task_id": task_id,
            "episodes": [episode.episode_id for episode in episodes],
            "success": [None if episode.failure is not None else is_success(episode) for episode in episodes],
            "answers": [episode.answer for episode in episodes],
        }
        for task_id, episodes in report.samples.items()
    ]


def _save(output: Path, values: Mapping[str, Any]) -> str:
    """Write the report; return why that failed, or "" where it did not."""
    try:
        write_json(output, values)
    except OSError as error:
        return f"cannot write --output {output}: {error.strerror}; the results are only printed"
    return ""


def _report_failures(run: RunConfig, report: EvalReport) -> None:
    """Print to standard error what failed; raise if too much did."""
    first, count, limit = report.first_failed, len(report.episodes), run.rollout.max_failure_rate
    if first is None or first.failure is None:
        return
    reasons = ", ".join(f"{number} {reason}" for reason, number in report.failures.items())
    what = f"{report.failed} of {count} episodes failed: {reasons}"
    others = f"success rate and returns are over the other {count - report.failed}"
    what += "; there is no success rate" if report.failed == count else f"; {others}"
    failure, trace = first.failure, first.failure.traceback
    if first.stop_reason == StopReason.SERVER_ERROR:  # keep the workflow's call, drop how the connection broke
        trace = trace.split(_CAUSES)[-1]
    details = f"The first failure, task {first.task_id}, was {failure.kind}: {failure.message}\n{trace}".rstrip()
    if report.failed == count:
        raise ErrorBudgetExceeded(f"{what}; fix the cause. {details}")
    if report.failed > limit * count:
        over = f"That is over rollout.max_failure_rate {limit:.0%}; fix the cause, or raise that limit"
        raise ErrorBudgetExceeded(f"{what}. {over}. {details}")
    print(f"{what}. {details}", file=sys.stderr)


@dataclass(slots=True)
class ServerLogs:
    """The place of the logs of an evaluation's servers."""

    folder: Path
    wanted: bool = False
    """Whether something failed, so that the logs stay."""


@contextmanager
def server_logs(run: RunConfig) -> Generator[ServerLogs]:
    """Yield the folder of the servers' logs; afterwards print where it is, or remove it if nothing failed."""
    logs = ServerLogs(Path(run.runs_dir) / "eval-logs" / f"{run.name}-{os.getpid()}")
    missing = [folder for folder in (logs.folder, *logs.folder.parents) if not folder.exists()]
    try:
        yield logs
    except BaseException:
        logs.wanted = True
        raise
    finally:
        if logs.wanted and logs.folder.is_dir():
            print(f"The servers' logs are in {logs.folder}/", file=sys.stderr)
        else:
            shutil.rmtree(logs.folder, ignore_errors=True)
            with suppress(OSError):  # stops at the first folder that holds something else
                for folder in missing[1:]:
                    folder.rmdir()


async def _at_checkpoint(
    run: RunConfig,
    target: Target,
    logs: ServerLogs,
    workflow: RolloutWorkflow,
    tasks: Sequence[Task],
    episodes: int,
    greedy: bool,
    on_episode: Callable[[Trajectory], None],
) -> EvalReport:
    checkpoint = target.checkpoint or Path(run.model.directory)
    renderer = load_renderer(run, checkpoint)
    async with launch_pool(
        run.resolved_inference, model_path=checkpoint, vocab_size=renderer.vocab_size, seed=run.seed, log_dir=logs.folder
    ) as pool:
        renderer = renderer.within(pool.max_context_tokens)
        with tuned_garbage_collector():
            return await evaluate_policy(
                workflow,
                tasks,
                runner=make_runner(run, workflow, renderer, model=checkpoint, log_dir=logs.folder),
                backend=pool,
                renderer=renderer,
                rollout=run.rollout,
                sampling=run.sampling,
                episodes=episodes,
                greedy=greedy,
                seed=run.seed,
                on_episode=on_episode,
            )


async def _at_endpoint(
    run: RunConfig,
    target: Target,
    key: str,
    workflow: RolloutWorkflow,
    tasks: Sequence[Task],
    episodes: int,
    greedy: bool,
    on_episode: Callable[[Trajectory], None],
) -> EvalReport:
    from openai import AsyncOpenAI

    sampling = run.sampling.model_copy(update={"temperature": 0.0}) if greedy else run.sampling
    connection = AsyncOpenAI(base_url=target.endpoint, api_key=key, timeout=run.inference.request_timeout_s)
    async with connection as endpoint, workflow.opened():
        with tuned_garbage_collector():
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
