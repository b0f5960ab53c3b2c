"""The numbers of the code demo: the demonstrator's errors, and the amounts of warm start and reinforcement learning.

Invariant: a recipe counts steps and episodes, never seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agentrl_workflows.code_demo.expert import CodeDemonstrator, code_demonstrations
from agentrl_workflows.code_demo.tokenizer import write_code_tokenizer
from agentrl_workflows.demo.model import write_random_model
from agentrl_workflows.demo.warm_start import WarmStartRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRecipe(WarmStartRecipe):
    """One variant of the code demo."""

    title: str = "Code agent"
    package: str = "agentrl_workflows.code_demo"
    limit_argument: str = "max_attempts"
    limit_unit: str = "attempt"
    limits_before: tuple[int, ...] = (1, 2, 3)
    limits_after: tuple[int, ...] = (1, 2, 3)
    demonstrator: CodeDemonstrator

    def write_student(self, folder: Path, seed: int) -> None:
        """Write the tokenizer and a random model to `folder`."""
        write_random_model(folder, vocab_size=write_code_tokenizer(folder), seed=seed)

    def write_demonstrations(self, path: Path, seed: int) -> None:
        """Write the demonstrations to `path`."""
        examples = code_demonstrations(count=self.num_demonstrations, seed=seed, demonstrator=self.demonstrator)
        path.write_text("".join(json.dumps(example) + "\n" for example in examples))


CODE = CodeRecipe(
    demonstrator=CodeDemonstrator(p_careless=0.75, p_repeat=0.65),
    num_demonstrations=12_000,
    sft_steps=1_000,
    eval_episodes=256,
)
"""The headline variant: the demonstrator's most likely attempts are wrong, the first and the later ones."""

CODE_SMOKE = CodeRecipe(
    demonstrator=CodeDemonstrator(p_careless=0.6, p_repeat=0.6),
    num_demonstrations=6_000,
    sft_steps=300,
    sft_conversations=16,
    eval_episodes=128,
    overrides={
        "engine.steps": 16,
        "engine.eval_every": 0,
        "algorithm.groups_per_step": 8,
        "trainer.lr": 1e-3,
        "trainer.warmup_steps": 2,
    },
)
"""The smallest variant, for tests: a demonstrator that errs less, and a few steps."""
