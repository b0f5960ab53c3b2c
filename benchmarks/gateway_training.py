"""The calculator agent trained over a door, beside the same agent in process: held-out success before and after, by seed.

Run: `python -m benchmarks.gateway_training --agent openai-agents --seed 0`, once for each agent and seed. The agents are
`in-process` (the demo's workflow), `openai-agents` (the unmodified SDK over Responses; it needs the package) and `node` (a
program in JavaScript, one process an episode; it needs Node.js). Those of one seed share the warm start, which the first of
them makes. `--steps` shortens a run. `--record` puts the finished runs of runs/ into benchmarks/results/.

Invariant: the runs differ in the workflow alone; the figures are those of the demo's own summary, unrounded, and success
during training is that of the episodes of each step.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console

from agentrl_workflows.calculator.recipe import FULL, CalculatorRecipe
from agentrl_workflows.demo.run import run_demo
from agentrl_workflows.demo.warm_start import make_student
from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gateway_training.json"
EXAMPLES = ROOT / "examples" / "gateway"
RUNS = Path("runs")
WINDOW = 10
"""Steps whose episodes one point of the curve is the mean of."""
STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorRecipe(CalculatorRecipe):
    """The calculator demo with the run file of an agent."""

    agent_file: Path
    limits_after: tuple[int, ...] = (6,)

    @property
    def run_file(self) -> str:
        """Path of the agent's run file."""
        return str(self.agent_file)


def recipe_of(agent: str) -> CalculatorRecipe:
    """Return the recipe of an agent."""
    if agent == "in-process":
        return replace(FULL, limits_after=(6,))
    given: dict[str, Any] = {
        "demonstrator": FULL.demonstrator,
        "num_demonstrations": FULL.num_demonstrations,
        "sft_steps": FULL.sft_steps,
    }
    if agent == "openai-agents":
        return DoorRecipe(agent_file=EXAMPLES / "openai_agents.yaml", **given)
    return DoorRecipe(agent_file=EXAMPLES / "calculator.yaml", limit_argument="", split=None, **given)


def run_name(agent: str, seed: int) -> str:
    """Return the name of a run's directory."""
    return f"door-{agent}-{seed}"


def train(agent: str, seed: int, steps: int, note: str) -> None:
    """Run one agent, and keep what the record needs beside its summary."""
    os.chdir(ROOT)
    folder = RUNS / f"door-student-{seed}"
    student = folder / "warm-start"
    if not (student / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_student(FULL, seed, folder, Console())
    overrides = ["--engine.steps", str(steps), "--engine.eval_every", "25", "--rollout.episode_timeout_s", "600"]
    name = run_name(agent, seed)
    run_demo(recipe_of(agent), seed=seed, runs_dir=RUNS, name=name, overrides=overrides, student=student)
    (RUNS / name / "record.json").write_text(json.dumps({"agent": agent, "note": note}))


def curve_of(run_dir: Path) -> list[float]:
    """Return the success of training episodes, a mean for each `WINDOW` steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [row["success_rate"] for row in rows if row.get("event") == "step" and "success_rate" in row]
    return [sum(part) / len(part) for at in range(0, len(rates), WINDOW) if (part := rates[at : at + WINDOW])]


def record() -> None:
    """Write the finished runs into the result file, in place of earlier ones of their agent and seed."""
    earlier: list[dict[str, Any]] = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    runs = {(run["agent"], run["seed"]): run for run in earlier}
    for marked in RUNS.glob("door-*/record.json"):
        summary = json.loads((marked.parent / "summary.json").read_text())
        summary.pop("checkpoint")
        run = {**json.loads(marked.read_text()), **summary, "training_success_by_10_steps": curve_of(marked.parent)}
        runs[run["agent"], run["seed"]] = run
    content = {
        "machine": describe_machine("torch", "openai"),
        "command": "python -m benchmarks.gateway_training --agent AGENT --seed N",
        "runs": [runs[key] for key in sorted(runs)],
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=["in-process", "openai-agents", "node"], default="in-process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--record", action="store_true", help="write the finished runs of runs/ into benchmarks/results/")
    given = parser.parse_args()
    if given.record:
        record()
    else:
        train(given.agent, given.seed, given.steps, given.note)


if __name__ == "__main__":
    main()
