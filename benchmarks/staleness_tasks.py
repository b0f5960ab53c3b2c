"""Stale data on the demos: the arms of `benchmarks.staleness` on math, on terminal tasks and on the pretrained model.

Run: `python -m benchmarks.staleness_tasks --tasks math terminal`. Each run is a whole demo with `algorithm.max_staleness` at
the lag; minutes to half an hour of two cores. What benchmarks/results/staleness_tasks.json has is not run again, so the
command can be stopped and started at will. It prints the held-out success by arm and lag.

`max_staleness` bounds the age of tokens and does not fix it: where rollouts are slower, tokens stay younger. The mean
age is recorded beside each success.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from agentrl.support.files import write_json
from benchmarks.machine import describe_machine
from benchmarks.staleness_demo import DEMO_ARMS

RESULTS = Path(__file__).parent / "results" / "staleness_tasks.json"
TASKS: Mapping[str, str] = {
    "math": "agentrl_workflows.math_demo.demo",
    "terminal": "agentrl_workflows.terminal_demo.demo",
    "pretrained": "agentrl_workflows.pretrained_demo.demo",
}
"""The module of each demo."""
ARMS = ("decoupled", "anchored", "plateau", "by_age", "dppo_tv", "naive")
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One run."""

    task: str
    seed: int
    lag: int
    arm: str

    @property
    def name(self) -> str:
        return f"{self.task}-{self.arm}-lag{self.lag}-seed{self.seed}"


def command(cell: Cell, runs: Path, extra: Sequence[str]) -> list[str]:
    """Return the command of the demo."""
    settings = {"max_staleness": cell.lag, **DEMO_ARMS[cell.arm]}
    flags = [part for key, value in settings.items() for part in (f"--algorithm.{key}", _text(value))]
    place = ["--seed", str(cell.seed), "--runs-dir", str(runs), "--name", cell.name]
    return [sys.executable, "-m", TASKS[cell.task], *place, *flags, *extra]


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def measured(cell: Cell, runs: Path, extra: Sequence[str]) -> Row | None:
    """Run the demo and return its row; None, with the end of its output printed, where it failed."""
    begin = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    done = subprocess.run(command(cell, runs, extra), capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(f"{cell.name} failed with status {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-2000:]}", flush=True)
        return None
    summary = json.loads((runs / cell.name / "summary.json").read_text())
    steps = [json.loads(line) for line in (runs / cell.name / "metrics.jsonl").read_text().splitlines()]
    names = ("sampled_before", "sampled_after", "greedy_after", "mean_staleness", "max_trained_staleness")
    row: Row = asdict(cell) | {name: summary[name] for name in names}
    row["curve"] = [round(step["success_rate"], 3) for step in steps if step["event"] == "step"]
    row["log_ratio_positive"] = [
        round(step["trainer.log_ratio_positive"], 4) for step in steps if "trainer.log_ratio_positive" in step
    ]
    return row | {"minutes": round((time.perf_counter() - begin) / 60, 1)}


def table(rows: Sequence[Row], task: str) -> Iterator[str]:
    """Yield a table of the sampled success after training, mean over seeds, by arm and lag."""
    here = [row for row in rows if row["task"] == task]
    lags = sorted({int(row["lag"]) for row in here})
    yield f"\n{task}\n"
    yield "| arm | " + " | ".join(f"lag {lag}" for lag in lags) + " |"
    yield "|---" * (len(lags) + 1) + "|"
    for arm in dict.fromkeys(row["arm"] for row in here):
        cells = [[row for row in here if (row["arm"], row["lag"]) == (arm, lag)] for lag in lags]
        yield f"| {arm} | " + " | ".join(_cell_text(each) for each in cells) + " |"


def _cell_text(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    values = [float(row["sampled_after"]) for row in rows]
    age = statistics.fmean(float(row["mean_staleness"]) for row in rows)
    each = ", ".join(f"{value:.2f}" for value in values)
    return f"{statistics.fmean(values):.2f} ({each}; mean age {age:.1f})"


def main() -> None:
    """Run what the result file lacks, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=tuple(TASKS))
    parser.add_argument("--arms", nargs="+", choices=DEMO_ARMS, default=ARMS)
    parser.add_argument("--lags", nargs="+", type=int, default=(4, 8))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0, 1))
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness-tasks"), help="folder for the runs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments, extra = parser.parse_known_args()
    results: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.exists() else {"rows": []}
    done = {tuple(row[name] for name in Cell.__slots__) for row in results["rows"]}
    product = itertools.product(arguments.tasks, arguments.seeds, arguments.lags, arguments.arms)
    left = [cell for each in product if tuple(asdict(cell := Cell(*each)).values()) not in done]
    for number, cell in enumerate(left, 1):
        print(f"{number} of {len(left)}: {cell.name}", flush=True)
        row = measured(cell, arguments.runs, extra)
        if row is not None:
            results["machine"] = describe_machine("torch")
            results["rows"].append(row)
            write_json(arguments.output, results)
    for task in arguments.tasks:
        print("\n".join(table(results["rows"], task)))


if __name__ == "__main__":
    main()
