"""The numbers of the calculator demo: the demonstrator's errors, and the amounts of warm start and reinforcement learning.

Invariant: a recipe counts steps and episodes, never seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl_workflows.calculator.expert import Demonstrator, write_demonstrations
from agentrl_workflows.calculator.tokenizer import write_tokenizer
from agentrl_workflows.demo.model import write_random_model
from agentrl_workflows.demo.recipe import EpisodeSplit
from agentrl_workflows.demo.warm_start import WarmStartRecipe

_BUSY = EpisodeSplit(metric="busy", field="busy_error", without="no busy error", having="had a busy error")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorRecipe(WarmStartRecipe):
    """One variant of the calculator demo."""

    title: str = "Calculator agent"
    package: str = "agentrl_workflows.calculator"
    limit_argument: str = "max_turns"
    limit_unit: str = "turn"
    limits_before: tuple[int, ...] = (6,)
    limits_after: tuple[int, ...] = (1, 2, 3, 6)
    split: EpisodeSplit | None = _BUSY
    next_run: str = "examples/calculator_agent.yaml"
    demonstrator: Demonstrator
    operations: int = 2
    """Operations of a task: 2 needs three turns, 1 needs two."""

    def write_student(self, folder: Path, seed: int) -> None:
        """Write the tokenizer and a random model to `folder`."""
        write_random_model(folder, vocab_size=write_tokenizer(folder), seed=seed)

    def write_demonstrations(self, path: Path, seed: int) -> None:
        """Write the demonstrations to `path`."""
        write_demonstrations(
            path,
            count=self.num_demonstrations,
            seed=seed,
            demonstrator=self.demonstrator,
            operations=self.operations,
        )


FULL = CalculatorRecipe(demonstrator=Demonstrator(p_guess=0.8), num_demonstrations=12_000, sft_steps=1_000)
"""The headline variant: the demonstrator's most likely first action is wrong."""

SMOKE = CalculatorRecipe(
    demonstrator=Demonstrator(p_guess=0.7),
    operations=1,
    num_demonstrations=2_000,
    sft_steps=300,
    sft_conversations=16,
    eval_episodes=128,
    overrides={
        "engine.steps": 15,
        "tasks.factory_args.operations": 1,
        "tasks.factory_args.count": 256,
        "tasks.eval.factory_args.operations": 1,
        "tasks.eval.factory_args.count": 128,
    },
)
"""The smallest variant, for tests: one operation."""
