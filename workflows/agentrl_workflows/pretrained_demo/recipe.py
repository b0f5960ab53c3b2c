"""The numbers of the demo with a pretrained model: the model, the evaluations and the amount of reinforcement learning.

Invariant: a recipe counts steps and episodes, never seconds; the type of the computation alone depends on the machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from agentrl.config.names import local_model
from agentrl_workflows.demo.recipe import DemoRecipe
from agentrl_workflows.pretrained_demo.fast_type import fast_type
from agentrl_workflows.pretrained_demo.model_file import fetch_model_file, kept_model_file

_WORKFLOWS = "agentrl_workflows.pretrained_demo.workflow"
_OPERATIONS = ("tasks.factory_args.operations", "tasks.eval.factory_args.operations")
_EVAL_COUNT = "tasks.eval.factory_args.count"


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedRecipe(DemoRecipe):
    """One variant of the demo with a pretrained model."""

    title: str = "SmolLM2-135M learns to use a calculator"
    package: str = "agentrl_workflows.pretrained_demo"
    start: str = "pretrained model"
    limit_argument: str = "max_turns"
    limit_unit: str = "turn"
    limits_before: tuple[int, ...] = (4,)
    limits_after: tuple[int, ...] = (4,)
    metrics: Mapping[str, str] = field(
        default_factory=lambda: {
            "calls": "calculations of an episode",
            "unclear": "turns without a calculation or an answer",
        }
    )
    eval_episodes: int = 200
    eval_servers: int = 2
    model: Path | None = None
    """A directory or a GGUF file; None: SmolLM2-135M-Instruct, which is fetched."""

    def settings(self) -> Mapping[str, object]:
        """Return the overrides, and the type in which this machine computes faster."""
        return {"trainer.dtype": fast_type(), **self.overrides}

    def model_path(self, folder: Path) -> Path:
        """Return the place of the GGUF file."""
        return self.model or kept_model_file()

    def fetch(self, console: Console) -> None:
        """Fetch the file, once."""
        if self.model is None:
            fetch_model_file(console)

    def make_model(self, folder: Path, seed: int, console: Console) -> Path:
        """Import the file, once."""
        return Path(local_model(str(self.model_path(folder))))


REAL = PretrainedRecipe()
"""The headline variant: problems of one operation."""

REAL_SMOKE = replace(
    REAL,
    eval_episodes=16,
    overrides={"engine.steps": 2, "algorithm.groups_per_step": 4, "trainer.warmup_steps": 2, _EVAL_COUNT: 16},
)
"""The smallest variant, for tests: it shows that everything runs, and not that the model learns."""

HARDER = replace(
    REAL,
    title="SmolLM2-135M on problems of one and two operations",
    overrides={
        "engine.steps": 24,
        "inference.max_context_tokens": 640,
        "workflow": f"{_WORKFLOWS}:ContinuedCalculator",
        **dict.fromkeys(_OPERATIONS, "[1, 2]"),
    },
)
"""One and two operations, which take turns; the second follows the answer to the first."""


def controlled(recipe: PretrainedRecipe) -> PretrainedRecipe:
    """Return a recipe whose rewards are shuffled within each group: it must not learn."""
    overrides = {**recipe.overrides, "workflow": f"{_WORKFLOWS}:ShuffledRewards"}
    return replace(recipe, title=f"{recipe.title}: control with shuffled rewards", overrides=overrides)


def with_adapter(recipe: PretrainedRecipe) -> PretrainedRecipe:
    """Return a recipe that trains an adapter of rank 8 in place of all weights."""
    lora = {"trainer.lora": "{rank: 8, alpha: 16}", "trainer.lr": 2e-4}
    return replace(recipe, title=f"{recipe.title}: LoRA", overrides={**recipe.overrides, **lora})
