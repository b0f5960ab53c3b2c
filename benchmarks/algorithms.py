"""Seven algorithms on the whole demo, three seeds each: success, steps and seconds.

Run: `python -m benchmarks.algorithms` (21 runs of the demo, 80 minutes of 2 cores). It prints its progress,
writes benchmarks/results/algorithms.json, and puts its table into docs/howto/algorithm.md. A run that the file has
is not repeated; `--again` repeats all. `--quick` trains the smallest variant on
one seed and writes nothing.

A run is the demo with other slots and nothing else changed: warm start, 200 steps, evaluations on 512 held-out tasks. So the
learning rate is the one that was chosen for the default; others may want another one.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.support.files import write_json
from agentrl_workflows.calculator.recipe import FULL, SMOKE
from agentrl_workflows.demo.run import run_demo
from benchmarks.machine import describe_machine

ALGORITHMS: Mapping[str, tuple[str, Sequence[str]]] = {
    "ppo": ("decoupled PPO (default)", ()),
    "grpo": ("GRPO", ("--algorithm.advantage", "grpo", "--algorithm.aggregate", "sequence")),
    "gspo": (
        "GSPO",
        (
            *("--algorithm.advantage", "grpo", "--algorithm.policy_loss", "gspo"),
            *("--algorithm.aggregate", "sequence"),
        ),
    ),
    "cispo": ("CISPO", ("--algorithm.policy_loss", "cispo")),
    "dppo_tv": ("DPPO-TV", ("--algorithm.policy_loss", "dppo_tv")),
    "rloo": ("RLOO", ("--algorithm.advantage", "rloo", "--algorithm.policy_loss", "reinforce")),
    "critic": ("PPO with a critic", ("--algorithm.preset", "ppo", "--algorithm.advantage", "turn_gae")),
}
"""The name in the table, and the flags of the run."""
SEEDS = (0, 1, 2)
TARGET, WINDOW = 0.8, 5
"""The run has learned after the first `WINDOW` steps whose batches have this mean success."""
RESULTS = Path(__file__).parent / "results" / "algorithms.json"
PAGE = Path(__file__).parents[1] / "docs" / "howto" / "algorithm.md"
BEGIN, END = "<!-- Written by `python -m benchmarks.algorithms`. -->", "<!-- End of the table. -->"


def steps_to_target(run_dir: Path) -> int | None:
    """Return the step that ends the first window of batches with the target's success; None: there is none."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [float(line["success_rate"]) for line in lines if line["event"] == "step"]
    found = (at for at in range(WINDOW, len(rates) + 1) if statistics.fmean(rates[at - WINDOW : at]) >= TARGET)
    return next(found, None)


def measure(name: str, seed: int, device: str, *, quick: bool) -> dict[str, Any]:
    """Run the demo with one algorithm and return its row."""
    recipe = SMOKE if quick else FULL
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        silent = Console(file=io.StringIO())
        flags = [*ALGORITHMS[name][1], "--trainer.device", device, "--inference.device", device]
        result = run_demo(recipe, seed=seed, runs_dir=Path(folder), name=name, overrides=flags, console=silent)
        reached = steps_to_target(result.run_dir)
    kept = ("sampled_before", "sampled_after", "greedy_after", "train_steps", "rl_seconds", "wall_seconds", "mean_staleness")
    return {"algorithm": name, "seed": seed, "device": device, "steps_to_target": reached} | {
        key: result.summary[key] for key in kept if key in result.summary
    }


def refused(name: str) -> str | None:
    """Return why this version of agentrl does not train an algorithm; None: it does."""
    try:
        load_config(FULL.run_file, ["--model.path", ".", *ALGORITHMS[name][1]])
    except ConfigError as error:
        return str(error)
    return None


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of the page: a row for each algorithm, its seeds side by side."""
    lines = [
        f"| algorithm | sampled success, seeds {' / '.join(map(str, SEEDS))} | greedy | steps to {TARGET:g} | minutes |",
        "|---|---|---|---|---|",
    ]
    for name, (title, _) in ALGORITHMS.items():
        mine = sorted((row for row in rows if row["algorithm"] == name), key=lambda row: row["seed"])
        if mine:
            cells = [
                [f"{row['sampled_after']:.2f}" for row in mine],
                [f"{row['greedy_after']:.2f}" for row in mine],
                ["-" if row["steps_to_target"] is None else str(row["steps_to_target"]) for row in mine],
                [f"{row['rl_seconds'] / 60:.1f}" for row in mine],
            ]
            lines.append(f"| {title} | " + " | ".join(" / ".join(each) for each in cells) + " |")
    return lines


def put_into_page(lines: Sequence[str], page: Path) -> None:
    """Replace what stands between the two marks of `page`."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"{page}: expected {BEGIN!r} and {END!r} once each, around the table")
    head, _, rest = text.partition(BEGIN)
    page.write_text("\n".join([f"{head}{BEGIN}", "", *lines, "", END]) + rest.partition(END)[2])


def main() -> None:
    """Run what the result file lacks, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--device", default="cpu", help="of trainer and server; the warm start is on the CPU")
    parser.add_argument("--again", action="store_true", help="measure what the result file already has, too")
    parser.add_argument("--quick", action="store_true", help="the smallest variant on one seed, not recorded")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    kept = arguments.output.exists() and not (arguments.again or arguments.quick)
    rows: list[dict[str, Any]] = json.loads(arguments.output.read_text())["runs"] if kept else []
    reasons = {name: refused(name) for name in arguments.algorithms}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"{name} is left out: {reason}", flush=True)
    # Seed by seed, so that what is measured early is a whole comparison.
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    asked = [(name, seed) for seed in seeds for name, reason in reasons.items() if reason is None]
    left = [each for each in asked if not any((row["algorithm"], row["seed"]) == each for row in rows)]
    began = time.perf_counter()
    for number, (name, seed) in enumerate(left, 1):
        rows.append(measure(name, seed, arguments.device, quick=arguments.quick))
        minutes = (time.perf_counter() - began) / number * (len(left) - number) / 60
        print(f"{number} of {len(left)}, about {minutes:.0f} minutes left: {rows[-1]}", flush=True)
        if not arguments.quick:
            record = {"machine": describe_machine("torch"), "target": TARGET, "window": WINDOW, "runs": rows}
            write_json(arguments.output, record)
    print("\n".join(table(rows)))
    if not arguments.quick:
        put_into_page(table(rows), arguments.page)


if __name__ == "__main__":
    main()
