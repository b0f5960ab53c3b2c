"""The second tier of `benchmarks.staleness`: the arms on the smallest demo, with a real model and real runs.

A run trains the smallest calculator demo from its warm start, in one process. Rollouts run ahead as far as
`algorithm.max_staleness` lets them, so that after some steps every token is that many versions old; `mean_staleness` of the
second half of a run is recorded. A worker process takes one run after the other.

Invariant: a run is described by its settings alone, so one that was recorded is not repeated.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from agentrl.errors import AgentRLError

DEMO_ARMS: Mapping[str, Mapping[str, object]] = {
    "naive": {"correction": {"proximal": "behavior", "token": "none"}},
    "decoupled": {},
    "none": {"correction": {"token": "none"}},
    "tis": {"correction": {"token": {"clamp": {"cap": 2.0}}}},
    "dppo_tv": {"policy_loss": "dppo_tv"},
    "guard": {"guard": "effective_samples"},
    "anchored": {"policy_loss": "anchored"},
    "plateau": {"policy_loss": {"anchored": {"plateau": True}}},
    "by_age": {"policy_loss": {"anchored": {"low_per_version": 0.05}}},
    "dppo_falls": {"policy_loss": {"dppo_tv": {"high": 1.0}}},
    "topr": {"policy_loss": "topr"},
    "anchored_guard": {"policy_loss": "anchored", "guard": "effective_samples"},
}
"""What each arm sets in the run file."""
DEMO_RATES = (4e-4, 1.6e-3)
GROUPS, MEMBERS = 6, 8
EVALUATED = 256
PATIENCE_S = 3600
RUNS_PER_PROCESS = 25
WINDOW = 5
"""Steps over which the success of a curve is averaged."""

DemoRow: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class DemoCell:
    """One run."""

    seed: int
    rate: float
    minibatches: int
    lag: int
    arm: str
    steps: int


def demo_cells(
    seeds: Sequence[int],
    lags: Sequence[int],
    minibatches: Sequence[int],
    steps: int,
    *,
    rates: Sequence[float] = DEMO_RATES,
    arms: Sequence[str] = tuple(DEMO_ARMS),
) -> list[DemoCell]:
    """Return all runs, whole seeds first, so that what is measured early is a whole comparison."""
    product = itertools.product(seeds, rates, minibatches, lags, arms)
    return [DemoCell(seed, rate, count, lag, arm, steps) for seed, rate, count, lag, arm in product]


def measured(
    cells: Sequence[DemoCell], students: Path, processes: int, known: Sequence[DemoRow], record: Callable[[DemoRow], None]
) -> None:
    """Run the cells that `known` lacks, and hand each row to `record`; prints how long the rest will take."""
    done = {tuple(row[name] for name in DemoCell.__slots__) for row in known}
    left = [cell for cell in cells if tuple(asdict(cell).values()) not in done]
    for seed in sorted({cell.seed for cell in left}):
        make_warm_start(students, seed)
    started, count = time.perf_counter(), 0
    context, part = multiprocessing.get_context("spawn"), RUNS_PER_PROCESS * processes
    for first in range(0, len(left), part):
        # New processes for each part: runs leave memory behind, and an executor that renews its own may wait for ever.
        with ProcessPoolExecutor(processes, mp_context=context) as pool, ExitStack() as stack:
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)  # an error must not wait for all other runs
            cell_of = {pool.submit(_run, cell, students): cell for cell in left[first : first + part]}
            for future in as_completed(cell_of):
                count += 1
                try:
                    record(future.result())
                except AgentRLError as error:  # the next start of the benchmark tries it again
                    print(f"demo: {cell_of[future]} ended with {type(error).__name__}: {error}", flush=True)
                minutes = (time.perf_counter() - started) / count * (len(left) - count) / 60
                print(f"demo: {count} of {len(left)} runs, about {minutes:.0f} minutes left", flush=True)


def make_warm_start(students: Path, seed: int) -> Path:
    """Return the warm start of a seed, made once."""
    from rich.console import Console

    from agentrl_workflows.calculator.recipe import SMOKE
    from agentrl_workflows.demo.warm_start import make_student

    folder = students / f"seed-{seed}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_student(SMOKE, seed, folder, Console())
        (folder / "done").touch()
    return folder / "warm-start"


def _run(cell: DemoCell, students: Path) -> DemoRow:
    import anyio
    import torch

    from benchmarks.one_process import smoke_run, train_here

    torch.set_num_threads(1)
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # batches of equal returns are nothing to report here
    algorithm = {"group_size": MEMBERS, "groups_per_step": GROUPS, "max_staleness": cell.lag, **DEMO_ARMS[cell.arm]}
    flags = {
        "seed": cell.seed,
        "tasks.factory_args.seed": cell.seed,
        "trainer.lr": cell.rate,
        "trainer.schedule": "constant",
        "trainer.minibatches": cell.minibatches,
        "engine.steps": cell.steps,
        "engine.save_trajectories": "false",
        "engine.stall_timeout_s": 2 * PATIENCE_S,
        "rollout.max_concurrent_episodes": 64,
        "rollout.episode_timeout_s": PATIENCE_S,  # a busy machine must not look like a policy that fails
    }
    started = time.process_time()
    row: DemoRow = dict(asdict(cell))
    with tempfile.TemporaryDirectory() as folder:
        run = smoke_run(make_warm_start(students, cell.seed), Path(folder), algorithm, flags)
        trainer, report = anyio.run(lambda: train_here(run, evaluated=EVALUATED))
        lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    curve: list[float] = [float(line["success_rate"]) for line in lines if line["event"] == "step"]
    metrics = [report.metrics for report in trainer.reports]
    assert report is not None
    row |= {"success": report.success_rate or 0.0, "cpu_seconds": round(time.process_time() - started, 1)}
    ratios = [each["sample_ess_ratio"] for each in metrics if "sample_ess_ratio" in each]
    ages = [each["mean_staleness"] for each in metrics[len(metrics) // 2 :] if "mean_staleness" in each]
    row["curve"] = [round(value, 3) for value in curve]
    for name in ("log_ratio_positive", "fallen_fraction_negative", "sample_ess_ratio"):
        row[name] = [round(each[name], 4) if name in each else None for each in metrics]
    if ratios:
        row["smallest_ess"] = min(ratios)
    if ages:  # steps of a collapsed policy train nothing
        row["mean_staleness"] = statistics.fmean(ages)
    fell = fall_of(curve)
    return row if fell is None else row | {"steps_to_collapse": fell}


def fall_of(curve: Sequence[float]) -> int | None:
    """Return the step after which the mean success of a window is below half of the best one, itself above 0.2."""
    means = [statistics.fmean(curve[at : at + WINDOW]) for at in range(len(curve) - WINDOW + 1)]
    for at, mean in enumerate(means):
        best = max(means[: at + 1])
        if best > 0.2 and mean < best / 2:
            return at + WINDOW
    return None


def demo_table(rows: Sequence[DemoRow]) -> Iterator[str]:
    """Yield tables of the mean final success and its 95 % interval by arm and lag, for each rate and minibatch count."""
    for rate, count in sorted({(float(row["rate"]), int(row["minibatches"])) for row in rows}):
        here = [row for row in rows if (row["rate"], row["minibatches"]) == (rate, count)]
        lags = sorted({int(row["lag"]) for row in here})
        yield f"\ndemo, {count} minibatch{'es' if count > 1 else ''}, learning rate {rate:g}\n"
        yield "| arm | " + " | ".join(f"lag {lag}" for lag in lags) + " |"
        yield "|---" * (len(lags) + 1) + "|"
        for arm in DEMO_ARMS:
            cells = [[float(row["success"]) for row in here if (row["arm"], row["lag"]) == (arm, lag)] for lag in lags]
            if any(cells):
                yield f"| {arm} | " + " | ".join(_mean_text(each) for each in cells) + " |"


def _mean_text(values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.2f}"
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.2f} ± {half:.2f}"
