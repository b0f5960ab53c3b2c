"""The calculator agent trained over a door, beside the same agent in process: held-out success before and after, by seed.

Run: `python -m benchmarks.gateway_training --agent openai-agents --seed 0`, once for each agent and seed. The agents are
`in-process` (the demo's workflow), `openai-agents` (the unmodified SDK over Responses; it needs the package) and `node` (a
program in JavaScript, one process an episode; it needs Node.js). Those of one seed share the warm start of the demo, which
the first of them makes. `--steps` shortens a run. `--record` puts the finished runs of runs/ into
benchmarks/results/ and their table into docs/howto/programs.md.

Invariant: the runs differ in the workflow alone. Success before is that of the warm start in process, success after that of
the trained weights with the agent itself, both sampled on 512 held-out tasks; success during training is that of the
episodes of each step.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
from rich.console import Console

from agentrl.commands.evaluate import Target, evaluate_target
from agentrl.commands.train import train_run
from agentrl.config import RunConfig, load_config
from agentrl_workflows.calculator.recipe import FULL
from agentrl_workflows.demo.warm_start import make_student
from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gateway_training.json"
RUN_FILES = {
    "in-process": Path(FULL.run_file),
    "openai-agents": ROOT / "examples" / "gateway" / "openai_agents.yaml",
    "node": ROOT / "examples" / "gateway" / "calculator.yaml",
}
RUNS = Path("runs")
PAGE = ROOT / "docs" / "howto" / "programs.md"
MARKS = ("<!-- training -->", "<!-- /training -->")
WINDOW = 5
"""Steps whose episodes one point of the curve is the mean of."""
STEPS = 40
EPISODES = 512


def run_name(agent: str, seed: int) -> str:
    """Return the name of a run's directory."""
    return f"door-{agent}-{seed}"


def config_of(agent: str, seed: int, steps: int, student: Path, workers: int = 0) -> RunConfig:
    """Return the run of an agent; all but the workflow is the same for each of them."""
    settings: dict[str, object] = {
        "name": run_name(agent, seed),
        "seed": seed,
        "model.path": student,
        "tasks.factory_args.seed": seed,
        "engine.steps": steps,
        "engine.eval_every": 0,
        "rollout.episode_timeout_s": 600,
        "rollout.max_concurrent_episodes": 32,
    }
    if workers:
        settings |= {"rollout.runner": "processes", "rollout.workers": workers}
    return load_config(str(RUN_FILES[agent]), [part for key, value in settings.items() for part in (f"--{key}", str(value))])


def warm_start(seed: int) -> tuple[Path, float]:
    """Return the warm start of a seed and its success, in process; made by the first run that needs it."""
    folder = RUNS / f"door-student-{seed}"
    student, success = folder / "warm-start", folder / "success.json"
    if not (student / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_student(FULL, seed, folder, Console())
    if not success.exists():
        success.write_text(json.dumps(evaluate(config_of("in-process", seed, STEPS, student), student)))
    return student, json.loads(success.read_text())


def evaluate(run: RunConfig, checkpoint: Path) -> float:
    """Return the sampled success of a checkpoint on the held-out tasks."""
    report = anyio.run(partial(evaluate_target, run, Target(checkpoint=checkpoint), episodes=EPISODES))
    assert report.success_rate is not None
    assert not report.failed
    return report.success_rate


def train(agent: str, seed: int, steps: int, workers: int, note: str) -> None:
    """Train one agent from the warm start of its seed, evaluate it, and keep the figures in its run directory."""
    os.chdir(ROOT)
    student, before = warm_start(seed)
    run = config_of(agent, seed, steps, student, workers)
    shutil.rmtree(run.run_dir, ignore_errors=True)
    begin = time.perf_counter()
    report = anyio.run(partial(train_run, run))
    seconds = time.perf_counter() - begin
    record = {
        "agent": agent,
        "seed": seed,
        "sampled_before": before,
        "sampled_after": evaluate(run, Path(str(report.checkpoint))),
        "episodes_evaluated": EPISODES,
        "train_steps": report.train_steps,
        "train_episodes": report.episodes,
        "failed_episodes": dict(report.failed_episodes),
        "max_trained_staleness": report.max_trained_staleness,
        "max_logprob_difference": report.max_logprob_difference,
        "rollout_workers": workers,
        "rl_seconds": seconds,
        "trainer_wait_seconds": report.trainer_wait_seconds,
        f"training_success_by_{WINDOW}_steps": curve_of(run.run_dir),
        "note": note,
    }
    (run.run_dir / "record.json").write_text(json.dumps(record))
    print(json.dumps(record))


def curve_of(run_dir: Path) -> list[float]:
    """Return the success of training episodes, a mean for each `WINDOW` steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [row["success_rate"] for row in rows if row.get("event") == "step" and "success_rate" in row]
    return [sum(part) / len(part) for at in range(0, len(rates), WINDOW) if (part := rates[at : at + WINDOW])]


def record() -> None:
    """Write the finished runs into the result file, in place of earlier ones of their agent and seed."""
    earlier: list[dict[str, Any]] = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    found = [json.loads(path.read_text()) for path in RUNS.glob("door-*/record.json")]
    runs = {(run["agent"], run["seed"]): run for run in (*earlier, *found)}
    content: dict[str, Any] = {
        "machine": describe_machine("torch", "openai"),
        "command": "python -m benchmarks.gateway_training --agent AGENT --seed N",
        "runs": [runs[key] for key in sorted(runs)],
    }
    RESULT.write_text(json.dumps(content, indent=1) + "\n")
    text = PAGE.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    PAGE.write_text(f"{text[:begin]}\n\n{table(content['runs'])}\n\n{text[end:]}")


def table(runs: list[dict[str, Any]]) -> str:
    """Return the runs as the table of the page."""
    rows = ["| seed | agent | steps | before | after | during training, each 5 steps |", "|---|---|---|---|---|---|"]
    for run in sorted(runs, key=lambda run: (run["seed"], list(RUN_FILES).index(run["agent"]))):
        during = " ".join(f"{rate:.2f}" for rate in run[f"training_success_by_{WINDOW}_steps"])
        ends = f"{run['sampled_before']:.2f} | {run['sampled_after']:.2f}"
        rows.append(f"| {run['seed']} | {run['agent']} | {run['train_steps']} | {ends} | {during} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=[*RUN_FILES], default="in-process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=0, help="processes that play the episodes; 0: the driver does")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    parser.add_argument("--record", action="store_true", help="write the finished runs of runs/ into benchmarks/results/")
    given = parser.parse_args()
    if given.record:
        record()
    else:
        train(given.agent, given.seed, given.steps, given.workers, given.note)


if __name__ == "__main__":
    main()
