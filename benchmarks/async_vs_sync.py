"""Asynchronous against synchronous RL on the demo's task: wall-clock to equal success, from the same warm start.

Run: .venv/bin/python benchmarks/async_vs_sync.py        (about eight minutes on two idle cores; wants the machine to itself)

Both run the demo's file, one thread each for server and trainer; they differ in algorithm.max_staleness alone (2 and 0). For
each seed the two run one after the other, the order alternating. What is compared is the wall-clock from the first episode
to the end of the first five training steps whose mean success is at least 0.80.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch
from rich.console import Console

from agentrl.commands.train import train_run
from agentrl.config import load_config
from agentrl.observe.progress import NoProgress
from agentrl.support.files import write_json
from agentrl_workflows.calculator.recipe import FULL
from agentrl_workflows.demo.warm_start import make_student

SEEDS = (0, 1, 2)
STEPS = 50
TARGET = 0.80
WINDOW = 5
RESULTS = Path(__file__).parent / "results" / "async_vs_sync.json"


def main() -> None:
    """Run all seeds in both modes, print the table and write the results."""
    console = Console()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as scratch:
        for number, seed in enumerate(SEEDS):
            model = make_student(FULL, seed, Path(scratch) / f"warm-{seed}", console)
            modes = (("async", 2), ("sync", 0))
            for mode, bound in modes if number % 2 == 0 else modes[::-1]:
                row = {"seed": seed, "mode": mode, **measure(Path(scratch), model, seed, mode, bound)}
                rows.append(row)
                console.print(row)
    ratios = [seconds(rows, seed, "sync") / seconds(rows, seed, "async") for seed in SEEDS if reached(rows, seed)]
    summary = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "target_success": TARGET,
        "window_steps": WINDOW,
        "sync_over_async_seconds_to_target": ratios,
        "median_ratio": statistics.median(ratios) if ratios else None,
        "sync_over_async_seconds_per_step": statistics.median(
            pick(rows, seed, "sync")["seconds_per_step"] / pick(rows, seed, "async")["seconds_per_step"] for seed in SEEDS
        ),
        "runs": rows,
    }
    write_json(RESULTS, summary)
    console.print(f"wall-clock to {TARGET} success, sync / async: {ratios}; wrote {RESULTS}")


def measure(scratch: Path, model: Path, seed: int, mode: str, bound: int) -> Mapping[str, Any]:
    """Return when one run reached the target, and its rates."""
    name = f"{mode}-{seed}"
    flags = {
        "name": name,
        "runs_dir": scratch,
        "seed": seed,
        "model.path": model,
        "tasks.factory_args.seed": seed,
        "algorithm.max_staleness": bound,
        "engine.steps": STEPS,
        "engine.eval_every": 0,
        "engine.save_trajectories": "false",
    }
    overrides = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    run = load_config(FULL.run_file, overrides)
    cpu, wall = cpu_seconds(), time.perf_counter()
    report = anyio.run(partial(train_run, run, progress=NoProgress()))
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    events = [json.loads(line) for line in (scratch / name / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    begin = steps[0]["wall_s"] - sum(steps[0][part] for part in ("trainer_wait_s", "train_s", "publish_s", "update_s"))
    at = next((i for i in range(WINDOW - 1, len(steps)) if mean_success(steps, i) >= TARGET), None)
    return {
        "steps_to_target": None if at is None else at + 1,
        "seconds_to_target": None if at is None else steps[at]["wall_s"] - begin,
        "seconds_per_step": (steps[-1]["wall_s"] - steps[0]["wall_s"]) / (len(steps) - 1),
        "trainer_wait_seconds": report.trainer_wait_seconds,
        "mean_staleness": report.mean_staleness,
        "max_trained_staleness": report.max_trained_staleness,
        "whole_run_seconds": wall,
        "whole_run_cpu_seconds": cpu,
    }


def cpu_seconds() -> float:
    """Return the CPU time of this process and those it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def mean_success(steps: list[dict[str, Any]], last: int) -> float:
    """Return the mean success of the window that ends with step `last`."""
    return statistics.fmean(step["success_rate"] for step in steps[last + 1 - WINDOW : last + 1])


def pick(rows: list[dict[str, Any]], seed: int, mode: str) -> dict[str, Any]:
    """Return the row of one run."""
    return next(row for row in rows if row["seed"] == seed and row["mode"] == mode)


def seconds(rows: list[dict[str, Any]], seed: int, mode: str) -> float:
    """Return the seconds one run took to the target."""
    return float(pick(rows, seed, mode)["seconds_to_target"])


def reached(rows: list[dict[str, Any]], seed: int) -> bool:
    """Return whether both runs of a seed reached the target."""
    return all(pick(rows, seed, mode)["seconds_to_target"] is not None for mode in ("async", "sync"))


if __name__ == "__main__":
    main()
