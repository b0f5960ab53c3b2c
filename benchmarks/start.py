"""Where the seconds go from `agentrl train` to the first episode of a run with the embedded server.

Run: `python -m benchmarks.start` (two minutes; `--repeats 1` for less). It prints a table and writes
benchmarks/results/start.json (`--output` names another file).

`agentrl train` trains a model of 0.1e6 parameters for one step, in a process of its own. A phase ends when a file of the run
appears or has a line, and the last one when the first episode, of one model call, is on disk. Processor seconds are those of
each process until then: a busy machine disturbs them less than the seconds on the wall. Other rows are imports in a fresh
interpreter, beside that of `openai`, which the client is built upon.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.embedded_decode import save_model as save_weights
from benchmarks.machine import cpu_seconds_of, describe_machine
from tests.support.tiny import build_tokenizer

RESULTS = Path(__file__).parent / "results" / "start.json"
PROCESSES = {"server": "agentrl.servers.serve", "trainer": "agentrl.trainer.worker"}
IMPORTS = {
    "import openai": "import openai",
    "first client": "import agentrl\nfrom agentrl.client import Client",
    "agentrl --help": "import agentrl.commands.main",
    "agentrl train": "from agentrl.commands.train import train_run",
}
PROBE = "import sys, time; begin = time.process_time(); exec(sys.argv[1]); print(time.process_time() - begin)"


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    starts: list[Mapping[str, float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        build_tokenizer(model, vocab_size=373)
        save_weights(model)
        for number in range(options.repeats):
            for name, code in IMPORTS.items():
                out = subprocess.run([sys.executable, "-c", PROBE, code], capture_output=True, text=True, check=True)
                imports[name].append(float(out.stdout))
            starts.append(start(Path(scratch), model, number))
    rows = {name: round(median(values), 3) for name, values in imports.items()}
    phases = {name: round(median(run[name] for run in starts), 3) for name in starts[0]}
    for name, value in {**{f"{name}, CPU s": value for name, value in rows.items()}, **phases}.items():
        print(f"{name:52} {value:8.3f}")
    report = {"machine": describe_machine("torch", "openai"), "import_cpu_s": rows, "start": phases}
    options.output.write_text(json.dumps(report, indent=1) + "\n")


def start(scratch: Path, model: Path, number: int) -> Mapping[str, float]:
    """Return the seconds of each phase of one start, and the processor seconds of each process until the first episode."""
    run_dir = scratch / f"start-{number}"
    command = [
        sys.executable, "-m", "agentrl", "train", str(run_file(scratch, model, run_dir.name)),
    ]  # fmt: skip
    began = time.perf_counter()
    marks: dict[str, float] = {}
    spent: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, text=True) as process:
        while process.poll() is None:
            now = time.perf_counter() - began
            for name, there in watched(run_dir).items():
                if there:
                    marks.setdefault(name, now)
            if "first record" not in marks:
                spent |= processor_seconds(process.pid)
            time.sleep(0.01)
    assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}"
    return {
        "driver: imports, plan, checks, wall s": marks["config.yaml"],
        "processes start, first episode, wall s": marks["first record"] - marks["config.yaml"],
        "all, wall s": marks["first record"],
        **{f"{name} until then, CPU s": value for name, value in spent.items()},
    }


def run_file(scratch: Path, model: Path, name: str) -> Path:
    """Write a run of one step, and return its file."""
    file = scratch / "run.yaml"
    file.write_text(
        json.dumps(
            {
                "name": name,
                "runs_dir": str(scratch),
                "workflow": "examples.calculator_agent:CalculatorAgent",
                "tasks": {"factory": "agentrl_envs.calculator:calculator_tasks", "factory_args": {"count": 64, "seed": 0}},
                "model": {"path": str(model)},
                "sampling": {"max_tokens": 8},
                "inference": {"max_context_tokens": 512},
                "rollout": {"max_turns": 1},
                "algorithm": {"group_size": 2, "groups_per_step": 2, "max_staleness": 0},
                "engine": {"steps": 1, "eval_every": 0, "stop_after_skipped": 0},
            }
        )
    )
    return file


def watched(run_dir: Path) -> Mapping[str, bool]:
    """Return which marks of a start are there."""
    episodes = run_dir / "episodes"
    return {
        "config.yaml": (run_dir / "config.yaml").exists(),
        "first record": episodes.is_dir() and any(file.stat().st_size for file in episodes.iterdir()),
    }


def processor_seconds(driver: int) -> Mapping[str, float]:
    """Return the processor seconds of the driver, its server and its trainer so far."""
    found = {"driver": cpu_seconds_of([driver])}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        for name, module in PROCESSES.items():
            if module in line and parent == driver:
                found[name] = cpu_seconds_of([int(entry.name)])
    return found


if __name__ == "__main__":
    main()
