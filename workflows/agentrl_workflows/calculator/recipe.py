"""The numbers of the demo: the demonstrator's errors, and the amounts of warm start and reinforcement learning.

Invariant: a recipe counts steps and episodes, never seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrator:
    """How the scripted demonstrator errs; each number is a probability."""

    p_guess: float
    """It answers with a number of the question instead of making the first call of an attempt."""
    p_give_up: float = 0.03
    """It guesses like that instead of making any later call, such as after an error."""
    p_slip: float = 0.03
    """One part of a call is wrong."""
    p_bad_call: float = 0.03
    """A call lacks an argument."""
    p_misread: float = 0.03
    """It guesses although it has the result."""
    p_busy: float = 0.5
    """The calculator is busy; more often than in training, so that the student learns to recover."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRecipe:
    """One variant of the demo."""

    demonstrator: Demonstrator
    operations: int = 2
    """Operations of a task: 2 needs three turns, 1 needs two."""
    num_demonstrations: int
    sft_steps: int
    sft_conversations: int = 24
    """Conversations of one warm-start step."""
    sft_lr: float = 5e-3
    """AdamW: embeddings and norms."""
    sft_muon_lr: float = 0.02
    """Muon: matrices."""
    sft_threads: int = 1
    device: str = "cpu"
    eval_episodes: int = 512
    """Held-out episodes of each evaluation."""
    max_turns: int = 6
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the run that differ from demo.yaml, by dotted name."""


FULL = DemoRecipe(demonstrator=Demonstrator(p_guess=0.8), num_demonstrations=12_000, sft_steps=1_000)
"""The headline variant: the demonstrator's most likely first action is wrong."""

SMOKE = DemoRecipe(
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
        "tasks.eval_factory_args.operations": 1,
        "tasks.eval_factory_args.count": 128,
    },
)
"""The smallest variant, for tests: one operation."""
