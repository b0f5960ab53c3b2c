"""`agentrl record`: episodes of a run file as cassettes.

Invariant: each episode that ended without a failure has one file, which replays to the same bytes; the others are named.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from agentrl.client import Client
from agentrl.commands.evaluate import Target, check_target, command_target, play_episodes, server_logs
from agentrl.commands.running import Overrides, check_writable, load_run, run_job
from agentrl.config import RunConfig
from agentrl.data.load import load_tasks
from agentrl.data.playable import playable_tasks
from agentrl.episode.tape import Recorder, using_tape, write_cassette
from agentrl.errors import ConfigError, ErrorBudgetExceeded, RunStopped
from agentrl.support.folders import make_private
from agentrl.support.foreign import one_line
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow, load_workflow
from agentrl_testing.replays import make_cassette

_MAX_NAME_CHARS = 80
_MAX_SEARCHED = 1_000
"""Tasks of endless sources among which an id is looked for."""


def record_command(
    config: Path,
    /,
    *overrides: Overrides,
    output: Path,
    task: str | None = None,
    episodes: int | None = None,
    checkpoint: Path | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
) -> None:
    """Run episodes and write each as a cassette, which `agentrl replay` plays without a model.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        output: Directory for the cassettes; a file of the same name is replaced.
        task: Id of the one task to record; the default is the held-out tasks, or else the training tasks, in order.
        episodes: Number of episodes; one by default.
        checkpoint: HF checkpoint to serve; the default without --endpoint is the file's model.path.
        endpoint: Base URL of an OpenAI-compatible endpoint to ask instead; its cassettes hold no token ids.
        model: Name of the model at the endpoint.
        api_key_env: Environment variable with the endpoint's key; the default is OPENAI_API_KEY, if that is set.
    """
    target = command_target(checkpoint, endpoint, model, api_key_env)
    run = load_run(config, overrides)
    job = partial(record_cassettes, run, output, target, task=task, episodes=episodes)
    run_job(job, lambda: f"The cassettes so far are in {output}.", stall_timeout_s=run.engine.stall_timeout_s)


async def record_cassettes(
    run: RunConfig, output: Path, target: Target, *, task: str | None = None, episodes: int | None = None
) -> None:
    """Run episodes and write a cassette of each into `output`, in place of files of the same name.

    Raises:
        ConfigError: there is no such task, or the target or a flag cannot be used.
        ServerError: no server could be started or reached.
        ErrorBudgetExceeded: every episode failed.

    Cancellation: ends episodes and servers; the cassettes so far stay.
    """
    count = 1 if episodes is None else episodes
    key = check_target(run, target, count)
    played = load_workflow(run.workflow, run.workflow_args)
    tasks = _choose_tasks(run, played, task, count)
    _make_folder(output)
    workflow = _RecordedWorkflow(played)
    written: list[Path] = []

    def save(trajectory: Trajectory) -> None:
        if trajectory.failure is None:
            written.append(_save_cassette(run, output, trajectory, workflow.tapes[trajectory.episode_id]))

    with server_logs(run) as logs:
        report = await play_episodes(run, target, key, logs, workflow, tasks, count, False, save)
    for path in sorted(written):
        print(one_line(str(path)))
    for episode in report.episodes:
        if episode.failure is not None:
            failure = episode.failure
            what = f"not recorded: task {episode.task_id}: {failure.kind}: {failure.message}"
            print(one_line(what), file=sys.stderr)
    if not written:
        raise ErrorBudgetExceeded(f"all {count} episodes failed, so no cassette was written; fix the cause printed above")


class _RecordedWorkflow(RolloutWorkflow):
    """A workflow each of whose episodes has a tape."""

    def __init__(self, inner: RolloutWorkflow) -> None:
        self.tapes: dict[str, Recorder] = {}
        self.limit_reward, self.deadline_reward = inner.limit_reward, inner.deadline_reward
        self._inner = inner

    @property
    def name(self) -> str:
        return self._inner.name

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        async with self._inner.opened():
            yield

    async def rollout(self, task: Task, client: Client) -> Trajectory:
        tape = self.tapes[client.episode.id] = Recorder()
        with using_tape(tape):
            return await self._inner.rollout(task, client)


def _choose_tasks(run: RunConfig, workflow: RolloutWorkflow, wanted: str | None, count: int) -> tuple[Task, ...]:
    sets = playable_tasks(load_tasks(run.tasks), run.tasks, workflow.refusal)
    if wanted is None:
        return sets.evaluation or sets.train.first(count)
    known = (*sets.evaluation, *(sets.train.first(_MAX_SEARCHED) if sets.train.is_endless else sets.train.finite))
    named = [task for task in known if task.id == wanted]
    if not named:
        some = ", ".join(task.id for task in known[:5])
        where = f"none of its first {_MAX_SEARCHED} tasks" if sets.train.is_endless else "no task"
        raise ConfigError(f"--task {wanted}: the run has {where} with this id; it has {some}, ...")
    return (named[0],)


def _make_folder(output: Path) -> None:
    check_writable(output / "cassette.json", f"--output {output}")
    try:
        make_private(output)
    except OSError as error:
        raise ConfigError(f"--output {output}: expected a directory: {error.strerror}; name another") from error


def _save_cassette(run: RunConfig, output: Path, trajectory: Trajectory, tape: Recorder) -> Path:
    name = re.sub(r"[^\w.-]+", "_", trajectory.task_id)[:_MAX_NAME_CHARS]
    path = output / f"{name}-{trajectory.episode_id.rpartition('.')[2]}.json"
    cassette = make_cassette(trajectory, tape, workflow=run.workflow, workflow_args=dict(run.workflow_args))
    try:
        write_cassette(path, cassette)
    except OSError as error:
        raise RunStopped(f"cannot write {path}: {error.strerror or error}") from error
    return path
