"""The warm start of a demo: a random student imitates scripted demonstrations.

Invariant: the student has seen nothing but the demonstrations that its recipe writes.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agentrl.commands.models.sft import encode_conversations, run_sft_with_progress
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.config import SftConfig
from agentrl_workflows.demo.recipe import DemoRecipe

_FOLDER = "warm-start"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartRecipe(DemoRecipe):
    """A demo that begins with a warm start; a subclass says how to write the student and its demonstrations."""

    start: str = "warm start"
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

    @abstractmethod
    def write_student(self, folder: Path, seed: int) -> None:
        """Write a tokenizer and a model with random weights to `folder`, which does not exist yet."""

    @abstractmethod
    def write_demonstrations(self, path: Path, seed: int) -> None:
        """Write `num_demonstrations` conversations on training tasks to `path`, one `{"messages": [...]}` a line."""

    def model_path(self, folder: Path) -> Path:
        """Return where the warm start goes."""
        return folder / _FOLDER

    def make_model(self, folder: Path, seed: int, console: Console) -> Path:
        """Make the warm start."""
        return make_student(self, seed, folder, console)


def make_student(recipe: WarmStartRecipe, seed: int, folder: Path, console: Console) -> Path:
    """Write tokenizer, random model and demonstrations to `folder`, train on them, and return the checkpoint."""
    console.rule(f"warm start: {recipe.sft_steps} steps on {recipe.num_demonstrations} demonstrations")
    student, data = folder / "random-model", folder / "demonstrations.jsonl"
    recipe.write_student(student, seed)
    recipe.write_demonstrations(data, seed)
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
    report = run_sft_with_progress(student, folder / _FOLDER, config, encode_conversations(data, Renderer.load(student)))
    console.print(f"loss {report.first_loss:.3f} -> {report.last_loss:.3f} nats per token in {report.seconds:.0f} s")
    return folder / _FOLDER
