"""A pretrained model learns to use a tool: SmolLM2-135M-Instruct, on this machine's CPU.

Run `make demo-real`, or `python -m agentrl_workflows.pretrained_demo.demo`. The model (93 MB) is fetched once; after that no
network is needed. A word problem is asked; the model writes `CALC(12 + 5)` as text, reads `RESULT: 17`, and ends with
`ANSWER: 17`. Two worked examples show how; reinforcement learning makes the model do it, for multiplication too, which no
example shows. The command prints success on held-out problems before and after, and writes `curve.png` and `summary.json`
to `runs/demo-real/`.

Invariant: the numbers in the table come from held-out problems, which share no name, thing or pair of numbers with training.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cyclopts import App
from rich.console import Console

from agentrl.commands.running import Overrides, run_command
from agentrl.errors import ConfigError
from agentrl_workflows.demo.command import play_demo
from agentrl_workflows.pretrained_demo.recipe import HARDER, REAL, REAL_SMOKE, controlled, with_adapter

app = App(
    name="demo-real",
    help="A pretrained model learns to use a tool, on this machine's CPU.",
    suppress_keyboard_interrupt=False,  # `run_command` prints where the results are
)


@app.default
def main(
    *overrides: Overrides,
    seed: int = 0,
    smoke: bool = False,
    harder: bool = False,
    lora: bool = False,
    control: bool = False,
    model: Path | None = None,
    runs_dir: Path = Path("runs"),
    name: str | None = None,
) -> None:
    """Run the demo.

    Args:
        overrides: Fields of the run file to override, such as --trainer.lr 1e-5.
        seed: Seed of tasks and sampling.
        smoke: Run the smallest variant: two steps, few problems.
        harder: Mix problems of one and two operations, and train longer.
        lora: Train an adapter of rank 8 in place of all weights.
        control: Shuffle the rewards within each group; the model must then learn nothing.
        model: Another chat model: a directory or a GGUF file.
        runs_dir: Parent of the run directory.
        name: Name of the run directory, which is replaced; the default says what runs.
    """
    if smoke and harder:
        raise ConfigError("--smoke and --harder: expected one of them; the smallest variant has problems of one operation")
    recipe = replace(HARDER if harder else REAL_SMOKE if smoke else REAL, model=model)
    words = ["smoke-real" if smoke else "demo-real", *(["harder"] if harder else [])]
    if lora:
        recipe = with_adapter(recipe)
        words.append("lora")
    if control:
        recipe = controlled(recipe)
        words.append("control")
    Console().print(f"{recipe.title}: {runs_dir / (name or '-'.join(words))}, seed {seed}", soft_wrap=True, highlight=False)
    outcome = play_demo(recipe, "-".join(words), overrides, seed=seed, runs_dir=runs_dir, name=name)
    Console().print(f"Look at curves, episodes and tokens:\n    agentrl view {outcome.run_dir}", soft_wrap=True)


if __name__ == "__main__":
    run_command(app)
