"""Two runs against each other: the fields of their run files, their figures, and their tasks.

Invariant: both runs recorded each figure under the same key. A task is compared by the episodes that played it last, those
of evaluations with one another and those of training with one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import yaml

from agentrl.commands.open_run import Run
from agentrl.config import RunConfig
from agentrl.config.describe import as_yaml, config_fields
from agentrl.episode.summary import EpisodeSummary
from agentrl.errors import ConfigError
from agentrl.observe.metric_keys import METRIC_KEYS

_LAST_STEPS: Final = 5
"""Steps whose mean is the final figure of training."""
_EVENTS: Final = ("evaluation", "step", "end")
_NO_FIGURE: Final = {
    "step",
    "policy_version",
    "wall_s",
    "min_version",
    "max_version",
    "greedy",
    "machine_cores",
    "resumed_from_step",
}


class FieldDifference(NamedTuple):
    """A field of the run file with two values, as YAML; None where a run's file and this release do not have it."""

    path: str
    left: str | None
    right: str | None


class Figure(NamedTuple):
    """A number of both runs."""

    event: str
    """`evaluation`: the last one; `step`: mean over the last steps; `end`: of the whole run."""
    key: str
    left: float
    right: float


class TaskResult(NamedTuple):
    """The outcome of the newest episodes of a task in one run."""

    step: int
    episode_ids: list[str]
    finished: int
    succeeded: int
    return_mean: float | None
    """Of the finished episodes; None where there is none."""

    @property
    def success_rate(self) -> float | None:
        """Share of the finished episodes; None where there is none."""
        return self.succeeded / self.finished if self.finished else None


class TaskPair(NamedTuple):
    """A task that both runs played."""

    purpose: str
    task_id: str
    prompt: str
    left: TaskResult
    right: TaskResult

    @property
    def change(self) -> float:
        """The success rate of the right run minus that of the left; 0 where one of them has none."""
        before, after = self.left.success_rate, self.right.success_rate
        return 0.0 if before is None or after is None else after - before


def differing_fields(left: Run, right: Run) -> list[FieldDifference]:
    """Return the fields with different values, in the order of the reference; one that a file leaves out has its default."""
    defaults = {field.path: field.default for field in config_fields(RunConfig) if not field.is_section}
    values = _field_values(left.path), _field_values(right.path)
    known = [path for path in defaults if path != "name"]
    own = sorted({*values[0], *values[1]} - {*known, "name"})
    pairs = [FieldDifference(path, *(side.get(path, defaults.get(path)) for side in values)) for path in [*known, *own]]
    return [pair for pair in pairs if pair.left != pair.right]


def common_figures(left: Run, right: Run) -> list[Figure]:
    """Return the final numbers that both runs have: evaluations first, then training, then the whole run."""
    sides = [_final_figures(run) for run in (left, right)]
    return [
        Figure(event, key, sides[0][event][key], sides[1][event][key])
        for event in _EVENTS
        for key in _ordered(event, sides[0][event].keys() & sides[1][event].keys())
    ]


def common_tasks(left: Run, right: Run) -> list[TaskPair]:
    """Return the tasks that both runs played: evaluations first, then those whose success changed most."""
    sides = [_task_results(run.episodes()) for run in (left, right)]
    pairs = [
        TaskPair(*key, prompt=prompt, left=result, right=sides[1][key][1])
        for key, (prompt, result) in sides[0].items()
        if key in sides[1]
    ]
    return sorted(pairs, key=lambda pair: (pair.purpose != "evaluation", -abs(pair.change)))


def _field_values(run_dir: Path) -> dict[str, str]:
    file = run_dir / "config.yaml"
    if not file.is_file():
        return {}
    try:
        fields: object = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"cannot read {file}: {type(error).__name__}: {error}") from error
    return dict(_leaf_values(cast("Mapping[str, object]", fields))) if isinstance(fields, dict) else {}


def _leaf_values(fields: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _leaf_values(cast("Mapping[str, object]", value), f"{path}.")
        else:
            yield path, as_yaml(value)


def _final_figures(run: Run) -> dict[str, dict[str, float]]:
    events = {kind: run.metrics(kind) for kind in _EVENTS}
    return {
        "evaluation": _mean_numbers(events["evaluation"][-1:]),
        "step": _mean_numbers(events["step"][-_LAST_STEPS:]),
        "end": _mean_numbers(events["end"][-1:]),
    }


def _mean_numbers(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for event in events:
        for key, value in event.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and key not in _NO_FIGURE:
                found.setdefault(key, []).append(value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _ordered(event: str, keys: set[str]) -> list[str]:
    entries = [entry for entry in METRIC_KEYS if entry.event == event]
    place = {key: next((at for at, entry in enumerate(entries) if entry.covers(key)), len(entries)) for key in keys}
    return sorted(keys, key=lambda key: (place[key], key))


def _task_results(rows: Sequence[EpisodeSummary]) -> dict[tuple[str, str], tuple[str, TaskResult]]:
    """Return the prompt by purpose and task, and the result of the last evaluation or group that played the task."""
    newest: dict[tuple[str, str], list[EpisodeSummary]] = {}
    for row in rows:
        key = (row.purpose, row.task_id)
        known = newest.get(key)
        if known and _playing(known[0]) == _playing(row):
            known.append(row)
        elif known is None or _playing(row) > _playing(known[0]):
            newest[key] = [row]
    return {
        key: (next((row.prompt for row in found if row.prompt), ""), _task_result(found)) for key, found in newest.items()
    }


def _playing(row: EpisodeSummary) -> int:
    return int(row.episode_id.split(".")[1]) if row.group is None else row.group


def _task_result(rows: Sequence[EpisodeSummary]) -> TaskResult:
    done = [row for row in rows if row.failure is None]
    returns = [row.episode_return for row in done if row.episode_return is not None]
    return TaskResult(
        step=rows[0].step,
        episode_ids=[row.episode_id for row in rows],
        finished=len(done),
        succeeded=sum(bool(row.success) for row in done),
        return_mean=sum(returns) / len(returns) if returns else None,
    )
