"""Fit a cost model to a finished run, from its own records: `metrics.jsonl`, `timeline.jsonl` and `episodes/`.

Invariant: a fitted number is not negative, and the model describes the run's own machine: its servers and its trainer, as
many as the run had. Nothing is guessed; what the run did not do, such as a checkpoint, costs nothing.

A model call is taken to last `overhead + (output + w * context) * (h + k) / R * (1 + slowdown * b)` seconds, where k is the
mean number of calls that ran on its server meanwhile and b the share of that time in which the trainer trained. Pauses are
subtracted first. R, h and the overhead come from non-negative least squares, w and the slowdown from a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError
from agentrl.observe.timeline import read_timeline
from agentrl.runs.reading import read_metrics, read_record_lines
from agentrl.simulate.costs.model import CostModel, ServerCost, TrainerCost, UpdateCost
from agentrl.simulate.workload import PlayedEpisode, PlayedTurn, RecordedSource

Floats: TypeAlias = NDArray[np.float64]

LEAST_STEPS = 4
"""Steps that a run must have done to be fitted; the first one, in which everything warms up, is left out."""
_CONTEXT_WEIGHTS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_SLOWDOWNS = tuple(step / 20 for step in range(0, 31))


class _TurnTimes(msgspec.Struct, frozen=True):
    """The fields of a recorded turn that a fit needs."""

    context_ids: list[int]
    output_ids: list[int]
    started_s: float | None
    ended_s: float | None


class _EpisodeTimes(msgspec.Struct, frozen=True):
    """The fields of a recorded episode that a fit needs."""

    purpose: str
    group: int | None
    episode_id: str
    episode_return: float | None
    failure: dict[str, Any] | None
    started_s: float | None
    ended_s: float | None
    turns: list[_TurnTimes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedRun:
    """A cost model, and the episodes to play with it."""

    costs: CostModel
    groups: dict[int, list[PlayedEpisode]]
    """Recorded attempts of each training group."""
    step_s: float
    """Mean seconds from one step to the next, measured."""
    call_error: float
    """Mean distance of a call's seconds from the model's, over the mean call."""

    def source(self, *, retries: int, seed: int) -> RecordedSource:
        """Return a source that draws these episodes again."""
        return RecordedSource(self.groups, retries=retries, seed=seed)


class _CallTable(NamedTuple):
    """One entry for each model call: [calls] float64."""

    starts: Floats
    ends: Floats
    outputs: Floats
    contexts: Floats


class _ServerFit(NamedTuple):
    cost: ServerCost
    overhead_s: float
    error: float


def fit_run(run_dir: Path, *, servers: int, server_gpus: int, requests: int | None, trainer_gpus: int) -> FittedRun:
    """Return the cost model of a finished run.

    Args:
        run_dir: its directory.
        servers: inference servers that it had.
        server_gpus: GPUs of each; on a CPU, 1.
        requests: the most that each ran together; None: no limit.
        trainer_gpus: GPUs, or processes, of its trainer.

    Raises:
        ConfigError: the run did too few steps, or its episodes or their times are not on disk.
    """
    steps = [line for line in read_metrics(run_dir) if line["event"] == "step"]
    if len(steps) < LEAST_STEPS:
        raise ConfigError(
            f"{run_dir} has {len(steps)} training steps, and a fit needs at least {LEAST_STEPS}; run it longer, or leave "
            "--from out to use the defaults of a GPU"
        )
    episodes = _read_episodes(run_dir)
    server = _fit_server(run_dir, episodes, servers, server_gpus, requests)
    groups: dict[int, list[PlayedEpisode]] = {}
    for episode in episodes:
        if episode.group is not None and episode.purpose == "training":
            groups.setdefault(episode.group, []).append(_played(episode, server.overhead_s))
    costs = CostModel(
        server=server.cost,
        trainer=_fit_trainer(steps[1:], trainer_gpus),
        update=_fit_update(run_dir, steps),
        origin=f"fitted to {len(steps)} steps of {run_dir}",
    )
    step_s = (steps[-1]["wall_s"] - steps[0]["wall_s"]) / (len(steps) - 1)
    return FittedRun(costs=costs, groups=groups, step_s=step_s, call_error=server.error)


def _read_episodes(run_dir: Path) -> list[_EpisodeTimes]:
    decoder = msgspec.json.Decoder(_EpisodeTimes)
    try:
        found = [decoder.decode(line.record) for line in read_record_lines(run_dir)]
    except msgspec.ValidationError as error:
        raise ConfigError(f"{run_dir}/episodes: not the records of a run of this release: {error}") from error
    timed = [episode for episode in found if _is_timed(episode)]
    if not any(episode.purpose == "training" for episode in timed):
        raise ConfigError(
            f"{run_dir} has no recorded episodes with times, which a fit needs; run with engine.save_trajectories: true, "
            "and without engine.keep_episode_steps, or leave --from out to use the defaults of a GPU"
        )
    return timed


def _is_timed(episode: _EpisodeTimes) -> bool:
    turns = all(turn.started_s is not None and turn.ended_s is not None for turn in episode.turns)
    return turns and bool(episode.turns) and episode.started_s is not None and episode.ended_s is not None


def _played(episode: _EpisodeTimes, overhead_s: float) -> PlayedEpisode:
    """Return the episode as the simulator plays it; what the servers' model leaves over of a call counts as outside."""
    turns: list[PlayedTurn] = []
    at = episode.started_s or 0.0
    for turn in episode.turns:
        gap = max(0.0, (turn.started_s or 0.0) - at)
        turns.append(PlayedTurn(gap + overhead_s, len(turn.context_ids), len(turn.output_ids)))
        at = max(at, turn.ended_s or 0.0)
    return PlayedEpisode(
        turns=tuple(turns),
        after_s=max(0.0, (episode.ended_s or 0.0) - at),
        episode_return=episode.episode_return,
        failed=episode.failure is not None,
    )


def _fit_server(
    run_dir: Path, episodes: Sequence[_EpisodeTimes], servers: int, server_gpus: int, requests: int | None
) -> _ServerFit:
    turns = [turn for episode in episodes for turn in episode.turns]
    calls = _CallTable(
        starts=np.array([turn.started_s for turn in turns], np.float64),
        ends=np.array([turn.ended_s for turn in turns], np.float64),
        outputs=np.array([len(turn.output_ids) for turn in turns], np.float64),
        contexts=np.array([len(turn.context_ids) for turn in turns], np.float64),
    )
    lasted = np.maximum(calls.ends - calls.starts, 1e-6)
    timeline = list(read_timeline(run_dir))
    paused = _within(calls, [(a.start_s, a.end_s) for a in timeline if a.activity == "pause"])
    training = _within(calls, [(a.start_s, a.end_s) for a in timeline if a.activity == "train"]) / lasted
    running = _within(calls, list(zip(calls.starts.tolist(), calls.ends.tolist(), strict=True))) / lasted / servers
    if requests is not None:
        running = np.minimum(running, requests)
    sampled_s = np.maximum(lasted - paused, 1e-6)
    best: tuple[float, Floats, float, float] | None = None
    for weight in _CONTEXT_WEIGHTS:
        for slowdown in _SLOWDOWNS:
            work = (calls.outputs + weight * calls.contexts) * (1 + slowdown * training)
            columns = np.stack([work, work * running, np.ones_like(work)], axis=1)
            found = _nonnegative(columns, sampled_s)
            error = float(np.square(columns @ found - sampled_s).sum())
            if best is None or error < best[0] * (1 - 1e-6):
                best = (error, found, weight, slowdown)
    assert best is not None
    _, (alone, shared, overhead_s), weight, slowdown = best
    shared = max(float(shared), 1e-9)
    work = (calls.outputs + weight * calls.contexts) * (1 + slowdown * training)
    predicted = work * (alone + shared * running) + overhead_s
    cost = ServerCost(
        tokens_per_s=1 / shared,
        half_saturation=float(alone) / shared,
        requests=requests,
        context_weight=weight,
        trainer_slowdown=slowdown,
        gpus=server_gpus,
    )
    return _ServerFit(cost, float(overhead_s), float(np.abs(predicted - sampled_s).mean() / sampled_s.mean()))


def _within(calls: _CallTable, spans: Sequence[tuple[float, float]]) -> Floats:
    """Return, for each call, the seconds that it shares with `spans`, summed over them: [calls] float64."""
    if not spans:
        return np.zeros_like(calls.starts)
    begins, ends = (np.array(side, np.float64) for side in zip(*spans, strict=True))
    times = np.concatenate([begins, ends])
    change = np.concatenate([np.ones_like(begins), -np.ones_like(ends)])
    order = np.argsort(times, kind="stable")
    times, active = times[order], np.cumsum(change[order])
    total = np.concatenate([[0.0], np.cumsum(active[:-1] * np.diff(times))])
    return np.interp(calls.ends, times, total) - np.interp(calls.starts, times, total)


def _nonnegative(columns: Floats, wanted: Floats) -> Floats:
    """Return the least-squares solution without negative entries: a column that would get one is left out."""
    kept = list(range(columns.shape[1]))
    while True:
        solution = np.linalg.lstsq(columns[:, kept], wanted, rcond=None)[0]
        if len(kept) == 1 or solution.min() >= 0:
            break
        del kept[int(solution.argmin())]
    result = np.zeros(columns.shape[1])
    result[kept] = np.maximum(solution, 0.0)
    return result


def _fit_trainer(steps: Sequence[dict[str, Any]], gpus: int) -> TrainerCost:
    trained = [line for line in steps if "skipped" not in line and line.get("trainer.computed_tokens")]
    if not trained:
        raise ConfigError(
            "no step of the run trained anything, so its trainer cannot be fitted; choose another run for --from"
        )
    tokens = np.array([line["trainer.computed_tokens"] for line in trained], np.float64)
    seconds = np.array([line["train_s"] for line in trained], np.float64)
    per_token, fixed_s = _nonnegative(np.stack([tokens, np.ones_like(tokens)], axis=1), seconds)
    return TrainerCost(fixed_s=float(fixed_s), gpu_s_per_token=float(per_token) * gpus, measured_gpus=gpus)


def _fit_update(run_dir: Path, steps: Sequence[dict[str, Any]]) -> UpdateCost:
    later = steps[1:]
    saved = {
        line["step"]: line.get("held_s", line["seconds"]) for line in read_metrics(run_dir) if line["event"] == "checkpoint"
    }

    def mean(key: str) -> float:
        return float(np.mean([line.get(key, 0.0) for line in later]))

    parts = ("trainer_wait_s", "train_s", "publish_s", "update_s", "trainer.seconds_spot_check")
    rest = [
        line["wall_s"] - before["wall_s"] - sum(line.get(part, 0.0) for part in parts) - saved.get(before["step"], 0.0)
        for before, line in zip(steps, later, strict=False)
    ]
    return UpdateCost(
        spot_check_s=mean("trainer.seconds_spot_check"),
        publish_s=mean("publish_s"),
        update_s=mean("update_s"),
        pause_s=mean("pause_s"),
        between_s=max(0.0, float(np.mean(rest))),
        checkpoint_s=float(np.mean(list(saved.values()))) if saved else 0.0,
        rereads_context=False,
    )
