"""`agentrl rescore`: the rewards of stored episodes again, with the workflow as it is now and without a model.

Invariant: nothing is written into the run. An episode whose workflow asks for something else than what is stored is counted
as diverged and has no new reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import anyio
import orjson

from agentrl.commands.open_run import Run, open_run
from agentrl.commands.running import check_writable, parse_json_object, run_job
from agentrl.episode.tape import Asked, Player
from agentrl.errors import ConfigError, RunStopped
from agentrl.rollout.config import RolloutConfig
from agentrl.support.concurrency import task_group
from agentrl.support.foreign import one_line
from agentrl.types import EpisodeFailure, Trajectory
from agentrl.workflow import GroupWorkflow, RolloutWorkflow, load_workflow
from agentrl_testing.commands.replay import stored_tool_answers
from agentrl_testing.replays import replay_trajectory

_MAX_CONCURRENT: Final = 16
_MAX_PRINTED: Final = 20
_LIVE: Final[frozenset[Asked]] = frozenset(("environment", "grader", "judge", "process", "clock"))
_LIVE_WITH_TOOLS: Final[frozenset[Asked]] = frozenset(("tool", *_LIVE))


def rescore_command(
    run: Path,
    /,
    *,
    workflow: str | None = None,
    workflow_args: str | None = None,
    step: int | None = None,
    limit: int | None = None,
    live_tools: bool = False,
    output: Path | None = None,
) -> None:
    """Compute the rewards of a run's stored episodes again, without a model, and print what changed.

    Args:
        run: Directory of the run, such as runs/demo; nothing in it is changed.
        workflow: Workflow to run, as module:Name; the default is the one of the run.
        workflow_args: Its arguments, as JSON; the default is those of the run.
        step: Only the episodes that ended before this training step was complete.
        limit: At most so many episodes.
        live_tools: Run the tools again instead of using their stored replies.
        output: File to write one JSON line an episode to.
    """
    args = None if workflow_args is None else parse_json_object(workflow_args, "--workflow-args")
    job = partial(rescore_run, run, workflow=workflow, workflow_args=args)
    run_job(
        partial(job, step=step, limit=limit, live_tools=live_tools, output=output),
        lambda: "An interrupted rescoring has no results.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoredEpisode:
    """The new worth of a stored episode."""

    episode_id: str
    task_id: str
    outcome: Literal["scored", "diverged", "failed", "failed before"]
    """Failed: the workflow failed now. Failed before: the stored episode has no reward to compare with."""
    before: float | None
    """The stored return; None for an episode that failed."""
    after: float | None = None
    """The return now; None unless the outcome is `scored`."""
    reason: str = ""
    """The reason why there is no return."""

    @property
    def has_changed(self) -> bool:
        """Whether it is worth something else now."""
        return self.outcome == "scored" and self.after != self.before


async def rescore_run(
    path: Path,
    *,
    workflow: str | None = None,
    workflow_args: Mapping[str, Any] | None = None,
    step: int | None = None,
    limit: int | None = None,
    live_tools: bool = False,
    output: Path | None = None,
) -> list[RescoredEpisode]:
    """Rescore the episodes of a run, print what changed, and return all outcomes in the order of the run.

    Environments, graders and judges run; what tools answered is what is stored, unless `live_tools` is set.

    Raises:
        ConfigError: there is no run, it has no such episodes, or the workflow cannot be used.
        RunStopped: `output` cannot be written, or no episode could be scored.

    Cancellation: ends the episodes; nothing is printed.
    """
    run = open_run(path)
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected at least 1")
    if output is not None:
        _check_outside(output, run.path)
    flow = _workflow(run, workflow, workflow_args)
    config = run.config
    timeout_s = (RolloutConfig() if config is None else config.rollout).episode_timeout_s
    outcomes = await _rescore_all(run, flow, step, limit, live_tools, timeout_s)
    if not outcomes:
        raise ConfigError(f"{path} has no stored episodes{'' if step is None else f' of step {step}'}")
    _show_outcomes(outcomes)
    if output is not None:
        _write(output, outcomes)
    if not any(each.outcome == "scored" for each in outcomes):
        raise RunStopped(f"none of {len(outcomes)} episodes could be scored; the reasons are printed above")
    return outcomes


def _check_outside(output: Path, run_dir: Path) -> None:
    if output.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(f"--output {output} is inside the run, which is left as it is; name another place")
    check_writable(output, f"--output {output}")


def _workflow(run: Run, spec: str | None, args: Mapping[str, Any] | None) -> RolloutWorkflow:
    config = run.config
    if spec is None:
        if config is None:
            raise ConfigError(f"{run.path} has no config.yaml, so pass --workflow module:Name")
        spec = config.workflow
    if args is None and config is not None and spec == config.workflow:
        args = config.workflow_args
    flow = load_workflow(spec, args)
    if isinstance(flow, GroupWorkflow):
        raise ConfigError(f"{flow.name} scores the episodes of a group together, and rescore runs single episodes")
    return flow


async def _rescore_all(
    run: Run, flow: RolloutWorkflow, step: int | None, limit: int | None, live_tools: bool, timeout_s: float
) -> list[RescoredEpisode]:
    outcomes: dict[int, RescoredEpisode] = {}
    places = anyio.Semaphore(_MAX_CONCURRENT)

    async def rescore_one(number: int, recorded: Trajectory) -> None:
        try:
            outcomes[number] = await _rescore(flow, recorded, live_tools, timeout_s)
        finally:
            places.release()

    async with flow.opened(), task_group() as tasks:
        for number, stored in enumerate(run.read_episodes(step=step)):
            if number == limit:
                break
            await places.acquire()
            tasks.start_soon(rescore_one, number, stored.trajectory)
    return [outcomes[number] for number in sorted(outcomes)]


async def _rescore(flow: RolloutWorkflow, recorded: Trajectory, live_tools: bool, timeout_s: float) -> RescoredEpisode:
    made = partial(RescoredEpisode, episode_id=recorded.episode_id, task_id=recorded.task_id)
    if recorded.failure is not None:
        return made(outcome="failed before", before=None, reason=_failure_text(recorded.failure))
    before = recorded.episode_return
    tape = Player(stored_tool_answers(recorded), live=_LIVE_WITH_TOOLS if live_tools else _LIVE)
    replayed = await replay_trajectory(flow, recorded, tape, timeout_s=timeout_s)
    if replayed.diverged:
        hint = "; --live-tools runs the tools again" if tape.diverged else ""
        return made(outcome="diverged", before=before, reason=f"{replayed.diverged[0]}{hint}")
    failure = replayed.trajectory.failure
    if failure is not None:
        return made(outcome="failed", before=before, reason=_failure_text(failure))
    return made(outcome="scored", before=before, after=replayed.trajectory.episode_return)


def _failure_text(failure: EpisodeFailure) -> str:
    return f"{failure.kind}: {failure.message}"


def _show_outcomes(outcomes: Sequence[RescoredEpisode]) -> None:
    scored = [each for each in outcomes if each.outcome == "scored"]
    changed = [each for each in scored if each.has_changed]
    print(f"{len(outcomes)} episodes: {len(scored)} scored, of which {len(changed)} changed")
    if scored:
        before = sum(each.before or 0.0 for each in scored) / len(scored)
        after = sum(each.after or 0.0 for each in scored) / len(scored)
        print(f"mean return of the scored episodes: {before:.4g} before, {after:.4g} now")
    if changed:
        width = max(len(each.episode_id) for each in changed[:_MAX_PRINTED])
        print(f"\nchanged\n  {'episode':<{width}}  {'before':>8}  {'now':>8}  task")
        for each in changed[:_MAX_PRINTED]:
            print(f"  {each.episode_id:<{width}}  {each.before:>8.4g}  {each.after:>8.4g}  {one_line(each.task_id)}")
        _print_rest(changed)
    for outcome, title in (
        ("diverged", "diverged: the workflow did something else than what is stored, so there is no new reward"),
        ("failed", "failed now"),
        ("failed before", "failed before: there is no stored reward"),
    ):
        found = [each for each in outcomes if each.outcome == outcome]
        if found:
            print(f"\n{len(found)} {title}")
            for each in found[:_MAX_PRINTED]:
                print(one_line(f"  {each.episode_id}, task {each.task_id}: {each.reason}"))
            _print_rest(found)


def _print_rest(found: Sequence[RescoredEpisode]) -> None:
    if len(found) > _MAX_PRINTED:
        print(f"  and {len(found) - _MAX_PRINTED} more; --output FILE lists all")


def _write(output: Path, outcomes: Sequence[RescoredEpisode]) -> None:
    try:
        output.write_bytes(b"".join(orjson.dumps(each, option=orjson.OPT_APPEND_NEWLINE) for each in outcomes))
    except OSError as error:
        raise RunStopped(f"cannot write --output {output}: {error.strerror}; the results are only printed") from error
