"""The learning demos, seed by seed: held-out success before and after, and the time.

Run: `python -m benchmarks.demo` (about four minutes on two idle cores), once for each seed: `--seed 1`. `--demo math`,
`code` and `terminal` run those demos instead of the calculator's, `lora` and `lora_merged` that one with an adapter of rank
8, which servers take beside their weights or merged into them. `real`, `real_control`, `real_harder` and
`real_harder_lora` train the pretrained model of `make demo-real`. `--backend sglang` runs the calculator's through a real
SGLang server (about 15 minutes; needs what `make sglang-install` installs). `--quick` runs the smallest variant and writes
nothing; `--recorded runs/demo` records an earlier run.
Each seed has one entry in a file of benchmarks/results/ (`FILES`).

Invariant: the run file is the demo's demo.yaml with `inference.backend`, the flags of its make target and nothing else
changed, and the figures are those of the demo's own summary, unrounded.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from agentrl.errors import ConfigError
from agentrl_workflows.calculator.recipe import FULL, SMOKE
from agentrl_workflows.code_demo.recipe import CODE, CODE_SMOKE
from agentrl_workflows.demo.recipe import DemoRecipe
from agentrl_workflows.demo.run import run_demo
from agentrl_workflows.math_demo.recipe import MATH, MATH_SMOKE
from agentrl_workflows.pretrained_demo.recipe import HARDER, REAL, REAL_SMOKE, controlled, with_adapter
from agentrl_workflows.terminal_demo.recipe import TERMINAL, TERMINAL_SMOKE
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results"
DEMOS: dict[str, tuple[DemoRecipe, DemoRecipe]] = {
    "calculator": (FULL, SMOKE),
    "math": (MATH, MATH_SMOKE),
    "code": (CODE, CODE_SMOKE),
    "terminal": (TERMINAL, TERMINAL_SMOKE),
    "lora": (FULL, SMOKE),
    "lora_merged": (FULL, SMOKE),
    "real": (REAL, REAL_SMOKE),
    "real_control": (controlled(REAL), controlled(REAL_SMOKE)),
    "real_harder": (HARDER, REAL_SMOKE),
    "real_harder_lora": (with_adapter(HARDER), with_adapter(REAL_SMOKE)),
}
"""The headline variant and the smallest one of each demo."""
ADAPTER = ("--trainer.lora", "{rank: 8, alpha: 16}", "--trainer.lr", "2e-3", "--sync.adapter")
FLAGS = {"lora": (*ADAPTER, "adapter"), "lora_merged": (*ADAPTER, "merged")}
"""Flags of a demo, those of `make demo-lora`."""
FILES = {
    ("calculator", "embedded"): ("demo.json", "make demo SEED=n"),
    ("calculator", "sglang"): ("demo_sglang.json", "make demo-sglang SEED=n"),
    ("math", "embedded"): ("demo_math.json", "make demo-math SEED=n"),
    ("code", "embedded"): ("demo_code.json", "make demo-code SEED=n"),
    ("terminal", "embedded"): ("demo_terminal.json", "make demo-terminal SEED=n"),
    ("lora", "embedded"): ("demo_lora.json", "make demo-lora SEED=n"),
    ("lora_merged", "embedded"): ("demo_lora_merged.json", "python -m benchmarks.demo --demo lora_merged --seed n"),
    ("real", "embedded"): ("demo_real.json", "make demo-real SEED=n"),
    ("real_control", "embedded"): ("demo_real_control.json", "make demo-real SEED=n ARGS=--control"),
    ("real_harder", "embedded"): ("demo_real_harder.json", "make demo-real SEED=n ARGS=--harder"),
    ("real_harder_lora", "embedded"): ("demo_real_harder_lora.json", 'make demo-real SEED=n ARGS="--harder --lora"'),
}
"""Result file and command of each demo and backend."""
SHOWN = ("sampled_before", "sampled_after", "greedy_before", "greedy_after", "max_logprob_difference", "wall_seconds")


def record(summary: dict[str, Any], demo: str, backend: str) -> None:
    """Put a run into the result file, in place of an earlier one of its seed."""
    file, command = FILES[demo, backend]
    path = RESULTS / file
    earlier: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [*(run for run in earlier if run["seed"] != summary["seed"]), summary]
    content = {
        "machine": describe_machine("torch", sglang=backend == "sglang"),
        "command": command,
        "runs": sorted(runs, key=lambda run: run["seed"]),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", choices=[*DEMOS], default="calculator")
    parser.add_argument("--backend", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the smallest variant, not recorded")
    parser.add_argument("--recorded", type=Path, help="a run directory to take the summary of, instead of running")
    parser.add_argument("--note", default="", help="what else the machine did meanwhile")
    given = parser.parse_args()
    if (given.demo, given.backend) not in FILES:
        parser.error(f"--demo {given.demo} is not measured with --backend {given.backend}")
    if given.recorded is not None:
        summary = json.loads((given.recorded / "summary.json").read_text())
    else:
        recipe = DEMOS[given.demo][given.quick]
        kind = f"{'smoke' if given.quick else 'demo'}-{given.demo}"
        name = f"{kind}-{given.backend}-{given.seed}"
        overrides = ("--inference.backend", given.backend, *FLAGS.get(given.demo, ()))
        try:
            outcome = run_demo(recipe, seed=given.seed, runs_dir=Path("runs"), name=name, overrides=overrides)
        except ConfigError as error:
            raise SystemExit(f"agentrl: {error}") from error
        summary = json.loads((outcome.run_dir / "summary.json").read_text())
    print(json.dumps({name: summary[name] for name in SHOWN}))
    if not given.quick:
        record(
            {name: value for name, value in summary.items() if name != "checkpoint"} | {"note": given.note},
            given.demo,
            given.backend,
        )


if __name__ == "__main__":
    main()
