"""The command line of a demo: `--seed`, `--smoke`, `--runs-dir`, `--name`, and overrides of its run file.

Invariant: every demo has the same flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cyclopts import App
from rich.console import Console

from agentrl.commands.running import Overrides
from agentrl.processes.watchdog.signals import describe_results, interrupt_note
from agentrl_workflows.demo.recipe import DemoRecipe
from agentrl_workflows.demo.run import DemoResult, run_demo


def demo_app(full: DemoRecipe, smoke: DemoRecipe, *, names: tuple[str, str], about: str) -> App:
    """Return the command of one demo.

    Args:
        full: what it runs.
        smoke: what it runs with `--smoke`.
        names: default run directory of each.
        about: the help text.
    """
    app = App(name=names[0], help=about, suppress_keyboard_interrupt=False)  # `run_command` prints where the results are
    recipes = (full, smoke)

    @app.default
    def main(
        *overrides: Overrides, seed: int = 0, smoke: bool = False, runs_dir: Path = Path("runs"), name: str | None = None
    ) -> None:
        """Run the demo.

        Args:
            overrides: Fields of the run file to override, such as --inference.backend sglang.
            seed: Seed of weights, demonstrations, tasks and sampling.
            smoke: Run the smallest variant: easy tasks, a short warm start, a few steps.
            runs_dir: Parent of the run directory.
            name: Name of the run directory, which is replaced; the default ends in -1 for seed 1.
        """
        outcome = play_demo(recipes[smoke], names[smoke], overrides, seed=seed, runs_dir=runs_dir, name=name)
        if command := next_command(recipes[smoke], outcome.run_dir):
            Console().print(f"Next, an agent of 25 lines on the same warm start:\n    {command}", soft_wrap=True)

    return app


def play_demo(
    recipe: DemoRecipe, default_name: str, overrides: Sequence[str], *, seed: int, runs_dir: Path, name: str | None
) -> DemoResult:
    """Run a demo and print the place of its results, also when it is interrupted. Seed 1 adds -1 to the default name."""
    run_name = name or (default_name if seed == 0 else f"{default_name}-{seed}")
    with interrupt_note(partial(describe_results, runs_dir / run_name)):
        outcome = run_demo(recipe, seed=seed, runs_dir=runs_dir, name=run_name, overrides=overrides)
    Console().print(
        f"Everything is in {outcome.run_dir}/: summary.json, curve.png, metrics.jsonl, episodes/", soft_wrap=True
    )
    return outcome


def next_command(recipe: DemoRecipe, run_dir: Path) -> str:
    """Return the command that trains further on the warm start of a demo, whatever its seed; empty if there is none."""
    return f"agentrl train {recipe.next_run} --model.path {run_dir / 'warm-start'}" if recipe.next_run else ""
