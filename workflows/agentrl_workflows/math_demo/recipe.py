"""The numbers of the math demo: the demonstrator's habits, and the amounts of warm start and reinforcement learning.

Invariant: a recipe counts steps and episodes, never seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_workflows.demo.model import write_random_model
from agentrl_workflows.demo.tokenizer import ROLE_PHRASES, write_phrase_tokenizer
from agentrl_workflows.demo.warm_start import WarmStartRecipe
from agentrl_workflows.math_demo.expert import Habits, write_answers
from agentrl_workflows.math_demo.problems import GAINS, LOSSES, MAX_CHANGE, MAX_START, NAMES, THINGS
from agentrl_workflows.math_feedback import FEEDBACK

MATH_PHRASES = (
    *ROLE_PHRASES,
    *(f"{name} has " for name in NAMES),
    *(f" {thing}, " for thing in THINGS),
    *(f"{verb} " for verb in (*GAINS, *LOSSES)),
    " and ",
    *(f". How many {thing} are left?" for thing in THINGS),
    "The answer is ",
    FEEDBACK,
)
"""The phrases of the tokenizer: those of the problems, of an answer, and of the feedback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MathRecipe(WarmStartRecipe):
    """One variant of the math demo."""

    title: str = "Math with feedback"
    package: str = "agentrl_workflows.math_demo"
    limit_argument: str = "max_attempts"
    limit_unit: str = "attempt"
    limits_before: tuple[int, ...] = (1, 2, 3)
    limits_after: tuple[int, ...] = (1, 2, 3)
    metrics: Mapping[str, str] = field(
        default_factory=lambda: {"repeated": "episodes that repeat a wrong answer", "attempts": "attempts of an episode"}
    )
    habits: Habits = field(default_factory=Habits)
    max_start: int = MAX_START
    max_change: int = MAX_CHANGE
    """Largest numbers of the demonstrated problems; `overrides` has those of the run's tasks, if they differ from these."""

    def write_student(self, folder: Path, seed: int) -> None:
        """Write the tokenizer and a random model to `folder`."""
        write_random_model(folder, vocab_size=write_phrase_tokenizer(folder, MATH_PHRASES), seed=seed)

    def write_demonstrations(self, path: Path, seed: int) -> None:
        """Write the demonstrations to `path`."""
        write_answers(
            path,
            count=self.num_demonstrations,
            seed=seed,
            habits=self.habits,
            max_start=self.max_start,
            max_change=self.max_change,
        )


MATH = MathRecipe(num_demonstrations=12_000, sft_steps=2_000)
"""The headline variant: the demonstrator's most likely first answer is wrong, and so is its answer to the feedback."""

MATH_SMOKE = MathRecipe(
    max_start=8,
    max_change=3,
    num_demonstrations=2_000,
    sft_steps=400,
    sft_conversations=16,
    eval_episodes=256,
    overrides={
        "engine.steps": 60,
        "trainer.lr": 3e-4,  # at 1e-3 two of four runs ended where they began
        "tasks.factory_args.max_start": 8,
        "tasks.factory_args.max_change": 3,
        "tasks.factory_args.count": 512,
        "tasks.eval.factory_args.max_start": 8,
        "tasks.eval.factory_args.max_change": 3,
        "tasks.eval.factory_args.count": 256,
    },
)
"""The smallest variant, for tests: small numbers."""
