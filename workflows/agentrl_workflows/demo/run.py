"""One run of a demo: its model, evaluation, reinforcement learning through the public path, evaluation.

Invariant: the numbers in the table come from held-out tasks, which neither training nor demonstrations contain.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console

from agentrl.commands.train import train_run
from agentrl.config import RunConfig, load_config
from agentrl.data.load import load_held_out
from agentrl.engine.report import RunReport
from agentrl.errors import ConfigError
from agentrl.inference.launch.sglang import find_sglang_python
from agentrl.processes.watchdog.loop import run_watched
from agentrl.support.files import write_json
from agentrl.weights.merging import whole_model
from agentrl.workflow import load_workflow
from agentrl_workflows.demo.curve import draw_curve
from agentrl_workflows.demo.evaluations import evaluate_checkpoint
from agentrl_workflows.demo.recipe import DemoRecipe
from agentrl_workflows.demo.results import print_table, rate_text, summary_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The run directory and the summary of a demo run."""

    run_dir: Path
    summary: Mapping[str, Any]


def run_demo(
    recipe: DemoRecipe,
    *,
    seed: int,
    runs_dir: Path,
    name: str,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> DemoResult:
    """Make the model, evaluate it, train it and evaluate it again; write and return the summary.

    `overrides` are command-line flags. An existing run directory of the same name is replaced.
    """
    console = console or Console()
    begin = time.perf_counter()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, dots, dashes and underscores")
    folder = runs_dir / name
    run = _run_config(recipe, seed, runs_dir, name, recipe.model_path(folder), overrides)
    if run.inference.urls:
        raise ConfigError("inference.urls: the demo starts its own servers for the models it has; remove this field")
    if run.inference.backend == "sglang":
        find_sglang_python(run.inference)  # fails now, not after the warm start
    anyio.run(_open_workflow, run)  # as does a workflow whose sandbox this machine does not have
    held_out = load_held_out(run.tasks)
    recipe.fetch(console)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = recipe.make_model(folder, seed, console)
    console.rule(f"before: the {recipe.start} on held-out tasks")
    before = run_watched(partial(evaluate_checkpoint, run, model, recipe, held_out, recipe.limits_before))
    sampled, greedy = rate_text(before.sampled.success_rate), rate_text(before.greedy.success_rate)
    console.print(f"sampled {sampled}, greedy {greedy}")
    console.rule("reinforcement learning")
    report = anyio.run(_train_student, run)
    console.rule("after: the trained weights on held-out tasks")
    checkpoint = whole_model(Path(str(report.checkpoint)))
    after = run_watched(partial(evaluate_checkpoint, run, checkpoint, recipe, held_out, recipe.limits_after))
    summary = {
        **summary_fields(recipe, before, after, report),
        "seed": seed,
        "dtype": run.trainer.dtype,
        "wall_seconds": time.perf_counter() - begin,
        "rl_seconds": report.wall_seconds,
    }
    write_json(folder / "summary.json", summary)
    draw_curve(folder, title=recipe.title, before=before, after=after)
    print_table(console, recipe, before, after, report, summary)
    return DemoResult(run_dir=folder, summary=summary)


def _run_config(
    recipe: DemoRecipe, seed: int, runs_dir: Path, name: str, model: Path, overrides: Sequence[str]
) -> RunConfig:
    settings: dict[str, object] = {
        "name": name,
        "runs_dir": runs_dir,
        "seed": seed,
        "model.path": model,
        "tasks.factory_args.seed": seed,
        **recipe.settings(),
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return load_config(recipe.run_file, [*flags, *overrides])


async def _open_workflow(run: RunConfig) -> None:
    async with load_workflow(run.workflow, run.workflow_args).opened():
        return


async def _train_student(run: RunConfig) -> RunReport:
    return await train_run(run, existing="use")
