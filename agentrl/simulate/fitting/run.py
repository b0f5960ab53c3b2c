"""Fit a cost model to a finished run, from its own records: `metrics.jsonl`, `timeline.jsonl` and `episodes/`.

Invariant: a fitted number is not negative, and the model describes the run's own machine: its servers and its trainer, as
many as the run had. What the run did not do, such as a checkpoint, costs nothing.

Where driver, servers and trainer shared cores, the costs are those of parts that have the cores for themselves: processor
seconds where the run recorded them, and the least seconds of any step for what waits for the driver's event loop. What they
leave unexplained of the run's own step time is added to all of them alike (`agentrl.simulate.fitting.replay`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentrl.errors import ConfigError
from agentrl.observe.timeline import read_timeline
from agentrl.runs.reading import read_metrics, read_record_lines
from agentrl.simulate.costs.model import CostModel, Fleet, HostCost, RunShape, TrainerCost, UpdateCost
from agentrl.simulate.fitting.replay import calibrate
from agentrl.simulate.fitting.server import CallTable, FittedServer, Floats, fit_server, seconds_within
from agentrl.simulate.workload import PlayedEpisode, PlayedTurn, RecordedSource

LEAST_STEPS = 4
"""Steps that a run must have done to be fitted; the first one, in which everything warms up, is left out."""
_PRIOR_FIXED_SHARE = 0.3
"""Standard deviation, before the run is seen, of the share of a training step that does not depend on its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachines:
    """The machines of the run to fit."""

    servers: int
    requests: int | None
    """The most that each server ran together; None: no limit."""
    server_gpus: int = 1
    """GPUs of each; on a CPU, 1."""
    trainer_gpus: int = 1
    """GPUs, or processes, of its trainer."""
    rereads_context: bool = True
    """Whether its servers read contexts again after an update (`inference.pause_mode: exact`)."""
    shares_cores: bool = False
    """Whether driver, servers and trainer computed on the cores of one machine."""
    server_threads: int = 1
    trainer_threads: int = 1
    """Of one process."""


class _TurnTimes(msgspec.Struct, frozen=True):
    context_ids: list[int]
    output_ids: list[int]
    started_s: float | None
    ended_s: float | None


class _EpisodeTimes(msgspec.Struct, frozen=True):
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
        return RecordedSource(self.groups, retries=retries, seed=seed)


def fit_run(run_dir: Path, machines: MeasuredMachines, shape: RunShape) -> FittedRun:
    """Return the cost model of a finished run.

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
    host = _fit_host(steps, episodes, machines)
    server = _fit_server(run_dir, steps, episodes, machines, host)
    outside_s = server.overhead_s if host.cores is None else -host.turn_s
    groups: dict[int, list[PlayedEpisode]] = {}
    for episode in episodes:
        if episode.group is not None and episode.purpose == "training":
            groups.setdefault(episode.group, []).append(_played(episode, outside_s))
    costs = CostModel(
        server=server.cost(requests=machines.requests, gpus=machines.server_gpus),
        trainer=_fit_trainer(steps[1:], machines, host),
        update=_fit_update(run_dir, steps, host),
        host=host,
        origin=f"fitted to {len(steps)} steps of {run_dir}",
    )
    step_s = (steps[-1]["wall_s"] - steps[0]["wall_s"]) / (len(steps) - 1)
    fitted = FittedRun(costs=costs, groups=groups, step_s=step_s, call_error=server.error)
    if host.cores is None:
        return fitted
    fleet = Fleet(servers=machines.servers, trainer_gpus=machines.trainer_gpus)
    shape = replace(shape, steps=len(steps))
    return replace(fitted, costs=calibrate(costs, step_s, shape, fleet, fitted.source(retries=1, seed=0)))


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


def _played(episode: _EpisodeTimes, outside_s: float) -> PlayedEpisode:
    """Return the episode as the simulator plays it, with `outside_s` more between two calls than was recorded."""
    turns: list[PlayedTurn] = []
    at = episode.started_s or 0.0
    for turn in episode.turns:
        gap = max(0.0, (turn.started_s or 0.0) - at)
        turns.append(PlayedTurn(max(0.0, gap + outside_s), len(turn.context_ids), len(turn.output_ids)))
        at = max(at, turn.ended_s or 0.0)
    return PlayedEpisode(
        turns=tuple(turns),
        after_s=max(0.0, (episode.ended_s or 0.0) - at),
        episode_return=episode.episode_return,
        failed=episode.failure is not None,
    )


def _fit_host(steps: Sequence[dict[str, Any]], episodes: Sequence[_EpisodeTimes], machines: MeasuredMachines) -> HostCost:
    """Return the cores and the driver's work, or no cores where none were shared or the run did not record them."""
    if not machines.shares_cores or not all("machine_cores" in line for line in steps):
        return HostCost()
    driver_s = sum(line["driver_busy_cores"] * (line["wall_s"] - before["wall_s"]) for before, line in pairwise(steps))
    trained = [line for line in steps if line.get("trainer.computed_tokens")]
    outside = [
        (line["train_s"] - line.get("trainer.seconds", line["train_s"])) / line["trainer.computed_tokens"]
        for line in trained
    ]
    batch_s = max(0.0, min(outside, default=0.0))
    pieces = sum(len(episode.turns) + 1 for episode in episodes) * (len(steps) - 1) / len(steps)
    tokens = sum(line.get("trainer.computed_tokens", 0) for line in steps[1:])
    return HostCost(
        cores=int(steps[-1]["machine_cores"]),
        turn_s=max(0.0, driver_s - batch_s * tokens) / pieces,
        batch_s_per_token=batch_s,
        server_threads=machines.server_threads,
        trainer_threads=machines.trainer_threads,
    )


def _fit_server(
    run_dir: Path,
    steps: Sequence[dict[str, Any]],
    episodes: Sequence[_EpisodeTimes],
    machines: MeasuredMachines,
    host: HostCost,
) -> FittedServer:
    timeline = list(read_timeline(run_dir))
    pauses = [(activity.start_s, activity.end_s) for activity in timeline if activity.activity == "pause"]
    updates = [end for _, end in pauses] if machines.rereads_context else []
    turns = [turn for episode in episodes for turn in episode.turns]
    calls = CallTable(
        starts=np.array([turn.started_s for turn in turns], np.float64),
        ends=np.array([turn.ended_s for turn in turns], np.float64),
        outputs=np.array([len(turn.output_ids) for turn in turns], np.float64),
        contexts=np.array([tokens for episode in episodes for tokens in _read_tokens(episode, updates)], np.float64),
    )
    training = seconds_within(calls, [(a.start_s, a.end_s) for a in timeline if a.activity == "train"]) / calls.lasted
    driver = float(np.mean([line.get("driver_busy_cores", 0.0) for line in steps[1:]]))
    return fit_server(
        calls,
        pauses,
        _slowdown(host, machines, training, min(1.0, driver)),
        servers=machines.servers,
        requests=machines.requests,
    )


def _read_tokens(episode: _EpisodeTimes, updates: Sequence[float]) -> Iterator[float]:
    """Yield the tokens that a server read for each call: new ones, and again those that one of `updates` (s) made useless.

    A call is taken to have half of its output at an update.
    """
    history, ended_s = 0, episode.started_s or 0.0
    for turn in episode.turns:
        new, output = len(turn.context_ids), len(turn.output_ids)
        started_s, before = turn.started_s or 0.0, ended_s
        ended_s = turn.ended_s or 0.0
        lost = bisect_right(updates, started_s) > bisect_right(updates, before)
        within = bisect_right(updates, ended_s) - bisect_right(updates, started_s)
        yield new + lost * history + within * (history + new + output / 2)
        history += new + output


def _slowdown(host: HostCost, machines: MeasuredMachines, training: Floats, driver: float) -> Floats:
    """Return the factor by which servers took longer because others used their cores.

    `training` is the share of each call's time in which the trainer trained, `driver` that in which the driver computed.
    """
    if host.cores is None:
        return np.ones_like(training)
    serving = machines.servers * host.server_threads
    both = serving + machines.trainer_gpus * host.trainer_threads
    without, beside = (
        max(1.0, threads / host.cores) * (1 - driver) + max(1.0, (threads + 1) / host.cores) * driver
        for threads in (serving, both)
    )
    return without * (1 - training) + beside * training


def _fit_trainer(steps: Sequence[dict[str, Any]], machines: MeasuredMachines, host: HostCost) -> TrainerCost:
    """Return the trainer's costs.

    The batches of one run hardly differ in tokens, so the data alone cannot tell what a step costs without any. The prior is
    that a step costs nothing without tokens, give or take `_PRIOR_FIXED_SHARE` of it.
    """
    trained = [line for line in steps if "skipped" not in line and line.get("trainer.computed_tokens")]
    if not trained:
        raise ConfigError(
            "no step of the run trained anything, so its trainer cannot be fitted; choose another run for --from"
        )
    tokens = np.array([line["trainer.computed_tokens"] for line in trained], np.float64)
    if host.cores is not None and "trainer.seconds_processor" in trained[0]:
        seconds = np.array([line["trainer.seconds_processor"] for line in trained], np.float64) / host.trainer_threads
    else:
        seconds = np.array([line["train_s"] for line in trained], np.float64)
    fixed_s, per_token = _split_seconds(tokens, seconds)
    return TrainerCost(
        fixed_s=fixed_s, gpu_s_per_token=per_token * machines.trainer_gpus, measured_gpus=machines.trainer_gpus
    )


def _split_seconds(tokens: Floats, seconds: Floats) -> tuple[float, float]:
    """Return the seconds of a step without tokens, and those of a token; neither is negative."""
    mean_s, mean_tokens = float(seconds.mean()), float(tokens.mean())
    columns = np.stack([np.ones_like(tokens), tokens], axis=1)
    free = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    noise = max(float(np.std(seconds - columns @ free)), 1e-6 * mean_s)
    prior = noise / (_PRIOR_FIXED_SHARE * mean_s)
    found = np.linalg.lstsq(np.vstack([columns, [prior, 0.0]]), np.append(seconds, 0.0), rcond=None)[0]
    fixed_s = min(max(0.0, float(found[0])), mean_s)
    return fixed_s, (mean_s - fixed_s) / mean_tokens


def _fit_update(run_dir: Path, steps: Sequence[dict[str, Any]], host: HostCost) -> UpdateCost:
    later = steps[1:]
    saved = {
        line["step"]: line.get("held_s", line["seconds"]) for line in read_metrics(run_dir) if line["event"] == "checkpoint"
    }

    def typical(values: Sequence[float]) -> float:
        """Return the mean, or the least where the others waited for cores and for the driver."""
        return float(np.mean(values) if host.cores is None else np.min(values))

    def typical_of(key: str) -> float:
        return typical([line[key] for line in later if key in line] or [0.0])

    waits = ("sync_wait_s",) if "sync_wait_s" in steps[-1] else ("publish_s", "update_s")  # of earlier releases
    parts = ("trainer_wait_s", "train_s", *waits, "trainer.seconds_spot_check")
    rest = [
        line["wall_s"] - before["wall_s"] - sum(line.get(part, 0.0) for part in parts) - saved.get(before["step"], 0.0)
        for before, line in zip(steps, later, strict=False)
    ]
    return UpdateCost(
        spot_check_s=typical_of("trainer.seconds_spot_check"),
        publish_s=typical_of("publish_s"),
        update_s=typical_of("update_s"),
        pause_s=typical_of("pause_s"),
        between_s=max(0.0, typical(rest)),
        checkpoint_s=typical(list(saved.values())) if saved else 0.0,
    )
