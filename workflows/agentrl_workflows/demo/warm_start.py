"""The warm start of a demo: a random student imitates scripted demonstrations.

Invariant: the student has seen nothing but the demonstrations that its recipe writes.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from agentrl.commands.models.sft import encode_conversations, run_sft_with_progress
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.config import SftConfig
from agentrl_workflows.demo.recipe import DemoRecipe


def make_student(recipe: DemoRecipe, seed: int, folder: Path, console: Console) -> Path:
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
    report = run_sft_with_progress(
        student, folder / "warm-start", config, encode_conversations(data, Renderer.load(student))
    )
    console.print(f"loss {report.first_loss:.3f} -> {report.last_loss:.3f} nats per token in {report.seconds:.0f} s")
    return folder / "warm-start"
