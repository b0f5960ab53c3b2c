"""Fit a cost model to a finished run, from its own records: `metrics.jsonl`, `timeline.jsonl` and `episodes/`.

Invariant: a fitted number is not negative, and the model describes the run's own machine: its servers and its trainer, as
many as the run had. What the run did not do, such as a checkpoint, costs nothing.

A model call is taken to last `overhead + (output + w * context) * (h + k) / R * slowdown` seconds, where k is the mean
number of calls that its server computed meanwhile, and the slowdown what the sharing of cores adds, which is known. The
overhead, in which the driver or the network has the call, grows with the calls in flight: `a + b * calls`. Pauses are
subtracted first. R, h, a and b come from non-negative least squares, w from a grid. A call does not count towards k in its
overhead; so the fit is repeated, with the seconds of each call that the fit before gave to the server.

Where driver, servers and trainer shared cores, the costs are those of parts that have the cores for themselves: processor
seconds where the run recorded them, and the least seconds of any step for what waits for the driver's event loop. They leave
a part of the run's step time unexplained: threads that wake up late, move between cores, or wait for memory. `calibrate`
plays the run and scales all costs by one factor to take that time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError
from agentrl.observe.runs.reading import read_metrics, read_record_lines
from agentrl.observe.timeline import read_timeline
from agentrl_simulate.costs import CostModel, Fleet, HostCost, RunShape, ServerCost, TrainerCost, UpdateCost
from agentrl_simulate.play import play_run
from agentrl_simulate.workload import EpisodeSource, PlayedEpisode, PlayedTurn, RecordedSource

Floats: TypeAlias = NDArray[np.float64]
Spans: TypeAlias = Sequence[tuple[float, float]]

_CONTEXT_WEIGHTS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_MORE_ROUNDS = 12
"""Fits after the first one, each with the servers' seconds of the one before."""
LEAST_STEPS = 4
"""Steps that a run must have done to be fitted; the first one, in which everything warms up, is left out."""
_PRIOR_FIXED_SHARE = 0.3
"""Standard deviation, before the run is seen, of the share of a training step that does not depend on its tokens."""
_ROUNDS = 5
"""Plays, each of which brings the step time closer to the measured one."""
_PLAYED_STEPS = 32


class CallTable(NamedTuple):
    """One entry for each model call: [calls] float64."""

    starts: Floats
    ends: Floats
    outputs: Floats
    contexts: Floats

    @property
    def lasted(self) -> Floats:
        """Seconds of each call."""
        return np.maximum(self.ends - self.starts, 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedServer:
    """One server, and what is left over of a call."""

    tokens_per_s: float
    half_saturation: float
    context_weight: float
    overhead_s: float
    """Of a call, seconds in which no server works for it."""
    error: float
    """Mean distance of a call's seconds from the model's, over the mean call."""

    def cost(self, *, requests: int | None, gpus: int) -> ServerCost:
        """Return the cost of a server that runs at most `requests` together, on `gpus` GPUs."""
        return ServerCost(
            tokens_per_s=self.tokens_per_s,
            half_saturation=self.half_saturation,
            requests=requests,
            context_weight=self.context_weight,
            gpus=gpus,
        )


def fit_server(calls: CallTable, pauses: Spans, slowdown: Floats, *, servers: int, requests: int | None) -> FittedServer:
    """Return the cost of each of `servers` equal servers.

    No server samples during `pauses`. `slowdown` is the factor of each call for shared cores: [calls], 1 where they are not.
    """
    sampled_s = np.maximum(calls.lasted - seconds_within(calls, pauses), 1e-6)
    in_flight = _overlapping(calls)
    fitted, served_s = _fit(calls, sampled_s, slowdown, np.clip(in_flight / servers, 1.0, requests), in_flight)
    for _ in range(_MORE_ROUNDS):
        middle = (calls.starts + calls.ends) / 2
        computed = calls._replace(starts=middle - served_s / 2, ends=middle + served_s / 2)
        running = np.clip(_overlapping(computed) / servers, 1.0, requests)
        fitted, served_s = _fit(calls, sampled_s, slowdown, running, in_flight)
    return fitted


def _overlapping(calls: CallTable) -> Floats:
    """Return the mean number of calls in the time of each call, itself included: [calls]."""
    spans = list(zip(calls.starts.tolist(), calls.ends.tolist(), strict=True))
    return seconds_within(calls, spans) / calls.lasted


def _fit(
    calls: CallTable, sampled_s: Floats, slowdown: Floats, running: Floats, in_flight: Floats
) -> tuple[FittedServer, Floats]:
    """Return the best fit, and the seconds of each call that it gives to the server: [calls]."""
    fits: list[tuple[FittedServer, Floats]] = []
    for weight in _CONTEXT_WEIGHTS:
        work = (calls.outputs + weight * calls.contexts) * slowdown
        columns = np.stack([work, work * running, np.ones_like(work), in_flight], axis=1)
        found = nonnegative(columns, sampled_s)
        alone, shared = float(found[0]), max(float(found[1]), 1e-9)
        server = FittedServer(
            tokens_per_s=1 / shared,
            half_saturation=alone / shared,
            context_weight=weight,
            overhead_s=float((columns[:, 2:] @ found[2:]).mean()),
            error=float(np.abs(columns @ found - sampled_s).mean() / sampled_s.mean()),
        )
        fits.append((server, np.minimum(columns[:, :2] @ found[:2], calls.lasted)))
    return min(fits, key=lambda one: one[0].error)


def seconds_within(calls: CallTable, spans: Spans) -> Floats:
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


def nonnegative(columns: Floats, wanted: Floats) -> Floats:
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


def _tokens_of_step(line: Mapping[str, Any]) -> float:
    """Return the tokens of a step's samples; those that samples share count for each, as in what the simulator plays."""
    return line.get("trainer.computed_tokens", 0) + line.get("trainer.shared_tokens", 0)


def _fit_host(steps: Sequence[dict[str, Any]], episodes: Sequence[_EpisodeTimes], machines: MeasuredMachines) -> HostCost:
    """Return the cores and the driver's work, or no cores where none were shared or the run did not record them."""
    if not machines.shares_cores or not all("machine_cores" in line for line in steps):
        return HostCost()
    driver_s = sum(line["driver_busy_cores"] * (line["wall_s"] - before["wall_s"]) for before, line in pairwise(steps))
    trained = [line for line in steps if line.get("trainer.computed_tokens")]
    outside = [(line["train_s"] - line.get("trainer.seconds", line["train_s"])) / _tokens_of_step(line) for line in trained]
    batch_s = max(0.0, min(outside, default=0.0))
    pieces = sum(len(episode.turns) + 1 for episode in episodes) * (len(steps) - 1) / len(steps)
    tokens = sum(_tokens_of_step(line) for line in steps[1:])
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
    tokens = np.array([_tokens_of_step(line) for line in trained], np.float64)
    if host.cores is not None and "trainer.seconds_processor" in trained[0]:
        seconds = np.array([line["trainer.seconds_processor"] for line in trained], np.float64) / host.trainer_threads
    else:
        seconds = np.array([line["train_s"] for line in trained], np.float64)
    fixed_s, per_token = _split_seconds(tokens, seconds)
    return TrainerCost(
        fixed_s=fixed_s, gpu_s_per_token=per_token * machines.trainer_gpus, measured_gpus=machines.trainer_gpus
    )


def _split_seconds(tokens: Floats, seconds: Floats) -> tuple[float, float]:
    """Return the seconds of a step without tokens, and the seconds per token; neither is negative."""
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


def calibrate(costs: CostModel, step_s: float, shape: RunShape, fleet: Fleet, source: EpisodeSource) -> CostModel:
    """Return `costs`, of parts on shared cores, scaled so that a step of the run takes the measured `step_s` seconds."""
    shape = replace(shape, steps=min(shape.steps, _PLAYED_STEPS))
    factor = 1.0
    for _ in range(_ROUNDS):
        factor *= step_s / play_run(shape, fleet, _scaled(costs, factor), source, warm_up=1).step_s
    origin = f"{costs.origin}; each cost times {factor:.2f}, so that the run itself takes as long as it did"
    return replace(_scaled(costs, factor), origin=origin)


def _scaled(costs: CostModel, factor: float) -> CostModel:
    server, trainer, update, host = costs.server, costs.trainer, costs.update, costs.host
    return replace(
        costs,
        server=replace(server, tokens_per_s=server.tokens_per_s / factor),
        trainer=replace(trainer, fixed_s=trainer.fixed_s * factor, gpu_s_per_token=trainer.gpu_s_per_token * factor),
        update=replace(
            update,
            spot_check_s=update.spot_check_s * factor,
            publish_s=update.publish_s * factor,
            update_s=update.update_s * factor,
            pause_s=update.pause_s * factor,
            between_s=update.between_s * factor,
            checkpoint_s=update.checkpoint_s * factor,
        ),
        host=replace(host, turn_s=host.turn_s * factor, batch_s_per_token=host.batch_s_per_token * factor),
    )
