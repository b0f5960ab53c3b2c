"""The numbers of the terminal demo: the demonstrator's errors, and the amounts of warm start and reinforcement learning.

Invariant: a recipe counts steps and episodes, never seconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agentrl_workflows.demo.model import write_random_model
from agentrl_workflows.demo.warm_start import WarmStartRecipe
from agentrl_workflows.terminal_demo.expert import NoteReader, note_demonstrations
from agentrl_workflows.terminal_demo.tokenizer import write_terminal_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalRecipe(WarmStartRecipe):
    """One variant of the terminal demo."""

    title: str = "Terminal agent"
    package: str = "agentrl_workflows.terminal_demo"
    limit_argument: str = "max_turns"
    limit_unit: str = "turn"
    limits_before: tuple[int, ...] = (4,)
    limits_after: tuple[int, ...] = (4,)
    reader: NoteReader

    def write_student(self, folder: Path, seed: int) -> None:
        """Write the tokenizer and a random model to `folder`."""
        write_random_model(folder, vocab_size=write_terminal_tokenizer(folder), seed=seed)

    def write_demonstrations(self, path: Path, seed: int) -> None:
        """Write the demonstrations to `path`."""
        examples = note_demonstrations(count=self.num_demonstrations, seed=seed, reader=self.reader)
        path.write_text("".join(json.dumps(example) + "\n" for example in examples))


TERMINAL = TerminalRecipe(
    reader=NoteReader(p_hasty=0.75),
    num_demonstrations=24_000,
    sft_steps=2_000,
    eval_episodes=96,
)
"""The headline variant: the demonstrator's most likely first command reads nothing.

With a quarter of these demonstrations some seeds copy the note that they read in one case of five, and reinforcement
learning teaches to read it, and little more.
"""

TERMINAL_SMOKE = TerminalRecipe(
    reader=NoteReader(p_hasty=0.5),
    num_demonstrations=4_000,
    sft_steps=300,
    sft_conversations=16,
    eval_episodes=32,
    overrides={
        "engine.steps": 6,
        "engine.eval_every": 0,
        "algorithm.groups_per_step": 4,
        "trainer.lr": 1e-3,
        "trainer.warmup_steps": 1,
    },
)
"""The smallest variant, for tests: a demonstrator that errs less, and a few steps."""
