"""The bundled demo: train a tiny transformer to use a tool over several turns, on this machine's CPU.

Run `make demo`, or `python -m agentrl_workflows.calculator.demo`. It takes about four minutes on two idle cores and needs
no network. A warm start first imitates a demonstrator whose most likely first action is wrong: it guesses instead of
calling the tool. Reinforcement learning then has to reverse that preference, through the public path: workflow, client,
HTTP to the embedded server, weight updates while requests run. The success rate climbs step by step. At the end the
command prints a table and writes `curve.png` and `summary.json` to `runs/demo/`. Flags override fields of demo.yaml: with
`--inference.backend sglang` the same run uses a real SGLang server.

Invariant: the numbers in the table come from held-out tasks, which neither the demonstrations nor training contain.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
from cyclopts import App
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentrl.cli.files import write_json
from agentrl.cli.main import Overrides, run_command
from agentrl.cli.sft import encode_conversations, run_sft_with_progress
from agentrl.cli.tasks import load_tasks
from agentrl.cli.train import train
from agentrl.config import RunConfig, load_config
from agentrl.engine.evaluate import EvalReport, evaluate
from agentrl.engine.report import RunReport
from agentrl.errors import ConfigError
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.launch.sglang import find_sglang_python
from agentrl.tokens.renderer import Renderer
from agentrl.train.config import SftConfig
from agentrl.watchdog.loop import run_watched
from agentrl.watchdog.signals import describe_results, interrupt_note
from agentrl.workflow import load_workflow
from agentrl_workflows.calculator.curve import draw_curve
from agentrl_workflows.calculator.expert import write_demonstrations
from agentrl_workflows.calculator.model import write_random_model
from agentrl_workflows.calculator.recipe import FULL, SMOKE, DemoRecipe
from agentrl_workflows.calculator.results import Evaluations, print_table, rate_text, summary_fields
from agentrl_workflows.calculator.tokenizer import write_tokenizer

TURN_LIMITS = (1, 2, 3, 6)
app = App(
    name="demo",
    help="Train the bundled calculator agent on this machine's CPU.",
    suppress_keyboard_interrupt=False,  # `run_command` prints where the results are
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The run directory and the summary of a demo run."""

    run_dir: Path
    summary: Mapping[str, Any]


@app.default
def main(
    *overrides: Overrides, seed: int = 0, smoke: bool = False, runs_dir: Path = Path("runs"), name: str | None = None
) -> None:
    """Run the demo.

    Args:
        overrides: Fields of demo.yaml to override, such as --inference.backend sglang.
        seed: Seed of weights, demonstrations, tasks and sampling.
        smoke: Run the smallest variant: one operation, a short warm start, a few steps.
        runs_dir: Parent of the run directory.
        name: Name of the run directory, which is replaced; the default is `demo`, `demo-1` for seed 1, or `smoke`.
    """
    default = "smoke" if smoke else "demo"
    run_name = name or (default if seed == 0 else f"{default}-{seed}")
    with interrupt_note(partial(describe_results, runs_dir / run_name)):
        outcome = run_demo(SMOKE if smoke else FULL, seed=seed, runs_dir=runs_dir, name=run_name, overrides=overrides)
    Console().print(f"Everything is in {outcome.run_dir}/: summary.json, curve.png, metrics.jsonl, trajectories.jsonl")


def run_demo(
    recipe: DemoRecipe,
    *,
    seed: int,
    runs_dir: Path,
    name: str,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> DemoResult:
    """Run warm start, evaluation, reinforcement learning and evaluation; write and return the summary.

    `overrides` are command-line flags. An existing run directory of the same name is replaced.
    """
    console = console or Console()
    begin = time.perf_counter()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, dots, dashes and underscores")
    folder = runs_dir / name
    run = _run_config(recipe, seed, runs_dir, name, folder / "warm-start", overrides)
    if run.inference.urls:
        raise ConfigError("inference.urls: the demo starts its own servers for the models it makes; remove this field")
    if run.inference.backend == "sglang":
        find_sglang_python(run.inference)  # fails now, not after the warm start
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    student = make_student(recipe, seed, folder, console)
    console.rule("before: the warm start on held-out tasks")
    before = run_watched(partial(_evaluate, run, student, recipe, (recipe.max_turns,)))
    sampled, greedy = rate_text(before.sampled.success_rate), rate_text(before.greedy.success_rate)
    console.print(f"sampled {sampled}, greedy {greedy}")
    console.rule("reinforcement learning")
    report = anyio.run(_train_student, run)
    console.rule("after: the trained weights on held-out tasks")
    checkpoint = Path(str(report.checkpoint))
    after = run_watched(partial(_evaluate, run, checkpoint, recipe, TURN_LIMITS))
    summary = {
        **summary_fields(before, after, report),
        "seed": seed,
        "wall_seconds": time.perf_counter() - begin,
        "rl_seconds": report.wall_seconds,
    }
    write_json(folder / "summary.json", summary)
    draw_curve(folder, before=before, after=after)
    print_table(console, before, after, report, summary)
    return DemoResult(run_dir=folder, summary=summary)


def make_student(recipe: DemoRecipe, seed: int, folder: Path, console: Console) -> Path:
    """Write tokenizer, random model and demonstrations to `folder`, train on them, and return the checkpoint."""
    console.rule(f"warm start: {recipe.sft_steps} steps on {recipe.num_demonstrations} demonstrations")
    student, data = folder / "random-model", folder / "demonstrations.jsonl"
    vocab_size = write_tokenizer(student)
    write_random_model(student, vocab_size=vocab_size, seed=seed)
    write_demonstrations(
        data,
        count=recipe.num_demonstrations,
        seed=seed,
        demonstrator=recipe.demonstrator,
        operations=recipe.operations,
    )
    config = SftConfig(
        data=str(data),
        steps=recipe.sft_steps,
        conversations_per_step=recipe.sft_conversations,
        optimizer="muon",
        lr=recipe.sft_lr,
        muon_lr=recipe.sft_muon_lr,
        threads=recipe.sft_threads,
        device=recipe.device,
        seed=seed,
    )
    report = run_sft_with_progress(
        student, folder / "warm-start", config, encode_conversations(data, Renderer.load(student))
    )
    console.print(f"loss {report.first_loss:.3f} -> {report.last_loss:.3f} nats per token in {report.seconds:.0f} s")
    return folder / "warm-start"


def _run_config(
    recipe: DemoRecipe, seed: int, runs_dir: Path, name: str, model: Path, overrides: Sequence[str]
) -> RunConfig:
    settings: dict[str, object] = {
        "name": name,
        "runs_dir": runs_dir,
        "seed": seed,
        "model.path": model,
        "tasks.factory_args.seed": seed,
        **recipe.overrides,
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    return load_config(str(files("agentrl_workflows.calculator").joinpath("demo.yaml")), [*flags, *overrides])


async def _train_student(run: RunConfig) -> RunReport:
    return await train(run, existing="use")


async def _evaluate(run: RunConfig, checkpoint: Path, recipe: DemoRecipe, turn_limits: tuple[int, ...]) -> Evaluations:
    """Evaluate one checkpoint on the held-out tasks: greedy once, sampled under each turn limit."""
    tasks = load_tasks(run.tasks).evaluation
    renderer = Renderer.load(checkpoint)

    async def one(turns: int, greedy: bool) -> EvalReport:
        workflow = load_workflow(run.workflow, {**run.workflow_args, "max_turns": turns})
        label = f"{'greedy' if greedy else 'sampled'}, at most {turns} turns"
        columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task(label, total=recipe.eval_episodes)
            return await evaluate(
                workflow,
                tasks,
                backend=pool,
                renderer=renderer.within(pool.max_context_tokens),
                rollout=run.rollout,
                sampling=run.sampling,
                episodes=recipe.eval_episodes,
                greedy=greedy,
                on_episode=lambda _episode: progress.advance(bar),
            )

    log_dir = run.run_dir / "logs" / "evaluation"
    async with launch_pool(
        run.resolved_inference, model_path=checkpoint, vocab_size=renderer.vocab_size, seed=run.seed, log_dir=log_dir
    ) as pool:
        greedy = await one(recipe.max_turns, True)
        return Evaluations(greedy=greedy, by_turns={turns: await one(turns, False) for turns in turn_limits})


if __name__ == "__main__":
    run_command(app)
