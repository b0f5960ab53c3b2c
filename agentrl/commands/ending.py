"""The last words of a run: what it did, what it left, and the commands that follow.

Invariant: everything comes from the files of the run. The summary of a resumed run starts at its first step; that of a
failed run ends where the run ended. Lines of work that was lost are left out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from agentrl.commands.open_run import open_run
from agentrl.config import RunConfig
from agentrl.observe.progress import duration_text
from agentrl.observe.runs.reading import ONLINE_FOLDER, read_metrics
from agentrl.plan.model import model_of
from agentrl.plan.resizing import advise_driver
from agentrl.plan.splits import split_planner
from agentrl.processes.watchdog.signals import describe_results

_Line: TypeAlias = Mapping[str, Any]


def describe_end(run: RunConfig, error: BaseException | None) -> str:
    """Return the summary of a run that has ended, many lines without a line feed at the end."""
    events = list(read_metrics(run.run_dir)) if (run.run_dir / "metrics.jsonl").is_file() else []
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    ends = [event for event in events if event["event"] == "end"]
    saved = [event["path"] for event in events if event["event"] == "checkpoint"]
    rows = [("run", _headline(run, steps, events, error))]
    if steps:
        rows += [("success", _course(steps, "success_rate", ".3f")), ("return", _course(steps, "return_mean", "+.3f"))]
    if ends:
        rows += _counts(ends[-1])
    if run.cluster.resize != "off":
        rows += _advice(run)
    rows.append(("checkpoint", saved[-1] if saved else "none: nothing was saved"))
    lines = [f"{name:<11} {text}" for name, text in rows]
    if evaluations:
        lines += ["evaluations", *_table(evaluations)]
    commands = _next(run, saved, finished=error is None)
    return "\n".join([*lines, "next", *(f"  {command}" for command in commands)])


def _advice(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield what the run's own idle time says about its GPUs and its driver."""
    serves_on_gpus = run.inference.backend == "sglang" and not run.inference.urls
    if serves_on_gpus and (move := split_planner().advise_move(run, model_of(run.model))) is not None:
        yield "split", f"{move} (cluster.split, or cluster.resize: at_restart)"
    if (driver := advise_driver(run)) is not None:
        yield "driver", driver


def describe_interrupted_run(run: RunConfig) -> str:
    """Return where the results of an interrupted run are, with its summary if it did something."""
    where = describe_results(run.run_dir)
    if not (run.run_dir / "metrics.jsonl").is_file():
        return where
    resolved = open_run(run.run_dir).config or run
    return f"{where}\n{describe_end(resolved, KeyboardInterrupt())}"


def _headline(run: RunConfig, steps: Sequence[_Line], events: Sequence[_Line], error: BaseException | None) -> str:
    done = steps[-1]["step"] if steps else 0
    took = duration_text(events[-1]["wall_s"]) if events else "no time"
    how = "finished" if error is None else f"ended by {type(error).__name__}"
    if isinstance(error, KeyboardInterrupt):
        how = "interrupted"
    return f"{run.name}: {how}, {done} of {run.engine.steps} steps in {took}; files in {run.run_dir}/"


def _course(steps: Sequence[_Line], key: str, form: str) -> str:
    known = [(step["step"], step[key]) for step in steps if key in step]
    if not known:
        return "no episode had a result"
    best = max(known, key=lambda found: found[1])
    (first, begin), (last, end) = known[0], known[-1]
    return f"{begin:{form}} in step {first}, {end:{form}} in step {last}; best {best[1]:{form}} in step {best[0]}"


def _counts(end: _Line) -> list[tuple[str, str]]:
    """Return the counters of the `end` line, which are those of its process."""
    since = f" since step {end['resumed_from_step']}" if end["resumed_from_step"] else ""
    parts = [f"{end['sampled_tokens']} sampled{since}", f"{end['trained_tokens']} trained"]
    parts += [f"{end['evaluation_tokens']} in evaluations"] if end["evaluation_tokens"] else []
    parts += [f"{count} wasted ({cause})" for cause, count in end["wasted_tokens"].items()]
    staleness = f"mean {end['mean_staleness']:.2f}, largest {end['max_trained_staleness']} of at most {end['max_staleness']}"
    rows = [("tokens", ", ".join(parts)), ("staleness", staleness)]
    lost = [
        f"{what} {_by_reason(end[key])}"
        for what, key in (
            ("episodes failed:", "failed_episodes"),
            ("groups dropped:", "dropped_groups"),
            ("steps that trained nothing:", "skipped_steps"),
        )
        if end[key]
    ]
    return [*rows, ("lost", "; ".join(lost) or "nothing: no episode failed, no group was dropped, every step trained")]


def _by_reason(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda item: -item[1]))


def _table(evaluations: Sequence[_Line]) -> Iterator[str]:
    yield f"  {'after step':>10}  {'success':>8}  {'return':>8}  {'episodes':>8}  {'failed':>6}  {'version':>9}"
    for line in evaluations:
        success = f"{line['success_rate']:.3f}" if "success_rate" in line else "-"
        reward = f"{line['return_mean']:+.3f}" if "return_mean" in line else "-"
        versions = f"{line['min_version']}-{line['max_version']}" if "min_version" in line else "-"
        yield (f"  {line['step']:>10}  {success:>8}  {reward:>8}  {line['episodes']:>8}  {line['failed']:>6}  {versions:>9}")


def _next(run: RunConfig, saved: Sequence[str], *, finished: bool) -> Iterator[str]:
    """Yield the commands that follow; the resolved run file in the directory of the run describes the same run."""
    file = shlex.quote(str(run.run_dir / "config.yaml"))
    yield f"agentrl view {shlex.quote(str(run.run_dir))}"
    is_online = (run.run_dir / ONLINE_FOLDER).is_dir()
    again = f"agentrl online {file} --keys FILE" if is_online else f"agentrl train {file}"
    if not saved:
        yield f"{again} {'--resume' if is_online else '--replace'}"
        return
    newest = shlex.quote(saved[-1])
    if run.tasks.eval is not None:
        yield f"agentrl eval {file} --checkpoint {newest}"
    yield f"agentrl chat {newest}"
    more = f" --engine.steps {2 * run.engine.steps}" if finished else ""
    yield f"{again} --resume{more}"
