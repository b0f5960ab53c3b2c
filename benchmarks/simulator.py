"""The simulator against real runs: fit one run of the calculator agent, predict others, and compare their step times.

Run: .venv/bin/python -m benchmarks.simulator [--runs DIR]        (three minutes on two cores that do nothing else)

All runs train the demo's smallest student on the embedded server, with a learning rate so small that the episodes stay as
they are. The fit sees the first run alone. The others differ from it in staleness bound, group size, groups of a batch or
servers. A prediction plays the same number of steps; what is compared is the mean seconds from one step to the next.
`--runs DIR` keeps the runs in DIR, and reuses those that ended there, so that a change of the simulator needs no new runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console

from agentrl.commands.train import train_run
from agentrl.config import RunConfig, load_config
from agentrl.observe.progress import NoProgress
from agentrl.support.files import write_json
from agentrl_simulate.costs import fleet_of_run, shape_of_run
from agentrl_simulate.fitting import FittedRun, fit_run
from agentrl_simulate.plan.basis import measured_machines
from agentrl_simulate.play import play_run
from agentrl_workflows.calculator.recipe import SMOKE
from agentrl_workflows.demo.warm_start import make_student
from benchmarks.machine import describe_machine

STEPS = 24
WARM_UP = 4
"""Steps at the beginning that neither the measurement nor the prediction counts."""
SETTINGS: dict[str, Mapping[str, Any]] = {
    "fitted": {"algorithm.max_staleness": 1},
    "synchronous": {"algorithm.max_staleness": 0},
    "staleness 4": {"algorithm.max_staleness": 4},
    "groups of 4": {"algorithm.max_staleness": 1, "algorithm.group_size": 4},
    "8 groups a step": {"algorithm.max_staleness": 1, "algorithm.groups_per_step": 8},
    "two servers": {"algorithm.max_staleness": 1, "inference.servers": 2},
    "16 episodes at once": {"algorithm.max_staleness": 1, "rollout.max_concurrent_episodes": 16},
    "32 groups of 4": {"algorithm.max_staleness": 2, "algorithm.groups_per_step": 32, "algorithm.group_size": 4},
    "two servers in turn": {"algorithm.max_staleness": 0, "inference.servers": 2},
}
RESULTS = Path(__file__).parent / "results" / "simulator.json"


def main() -> None:
    """Run every setting, predict all of them from the first, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="keep the runs here, and reuse those that ended here")
    runs = parser.parse_args().runs
    console = Console()
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as scratch:
        done = [do_run(runs or Path(scratch), name, settings, console) for name, settings in SETTINGS.items()]
        fitted = fit_run(done[0].run_dir, measured_machines(done[0]), shape_of_run(done[0]))
        console.print(fitted.costs)
        rows: list[dict[str, Any]] = [
            {"setting": name, **compare(run, fitted)} for name, run in zip(SETTINGS, done, strict=True)
        ]
    for row in rows:
        console.print(row)
    errors = [abs(row["error"]) for row in rows]
    summary = {
        "machine": describe_machine("torch"),
        "aim": 0.15,
        "largest_error": max(errors),
        "mean_call_error_of_the_fit": fitted.call_error,
        "runs": rows,
    }
    write_json(RESULTS, summary)
    console.print(f"largest error of a step time {max(errors):.1%}, aim 15 %; wrote {RESULTS}")


def do_run(folder: Path, name: str, settings: Mapping[str, Any], console: Console) -> RunConfig:
    """Return the run file of one setting, whose run has ended."""
    model = folder / "warm" / "warm-start"
    if not model.is_dir():
        make_student(SMOKE, 0, folder / "warm", console)
    run = load_run(folder, model, name, settings)
    summary = run.run_dir / "summary.json"
    if not summary.is_file() or json.loads(summary.read_text())["error"] is not None:
        anyio.run(partial(train_run, run, progress=NoProgress(), existing="replace"))
    return run


def load_run(scratch: Path, model: Path, name: str, settings: Mapping[str, Any]) -> RunConfig:
    """Return the run file of one setting."""
    flags = {
        **SMOKE.overrides,
        "name": name.replace(" ", "-"),
        "runs_dir": scratch,
        "model.path": model,
        "trainer.lr": "1.0e-12",
        "engine.steps": STEPS,
        "engine.eval_every": 0,
        "engine.stop_after_skipped": 0,
        **settings,
    }
    return load_config(SMOKE.run_file, [part for key, value in flags.items() for part in (f"--{key}", str(value))])


def compare(run: RunConfig, fitted: FittedRun) -> Mapping[str, Any]:
    """Return measured and predicted numbers of one run."""
    events = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    measured = (steps[-1]["wall_s"] - steps[WARM_UP - 1]["wall_s"]) / (len(steps) - WARM_UP)
    source = fitted.source(retries=run.rollout.episode_retries, seed=0)
    found = play_run(shape_of_run(run), fleet_of_run(run), fitted.costs, source, warm_up=WARM_UP)
    later, tokens = steps[WARM_UP:], [event["loss_tokens"] for event in steps[WARM_UP:]]
    return {
        "measured_step_s": measured,
        "predicted_step_s": found.step_s,
        "error": found.step_s / measured - 1,
        "measured_trainer_wait_s": sum(event["trainer_wait_s"] for event in later) / len(later),
        "predicted_trainer_wait_s": sum(step.wait_s for step in found.measured) / len(found.measured),
        "measured_train_s": sum(event["train_s"] for event in later) / len(later),
        "predicted_train_s": sum(step.train_s for step in found.measured) / len(found.measured),
        "measured_staleness": sum(e.get("staleness_mean", 0) * n for e, n in zip(later, tokens, strict=True)) / sum(tokens),
        "predicted_staleness": found.mean_staleness,
    }


if __name__ == "__main__":
    main()
