"""Settings that suit a model of a size, with their sources, and a look at those of a run.

A few recipes that were measured or published, and no law: between them the nearest one counts. Fields that are not named
here suit every size: clipping by 0.2 to both sides, and no KL term (TRL's defaults; verl's recipes have either no KL term
or one of 0.001).

Invariant: nothing of a run is changed. A model below `PRETRAINED` parameters is taken for one that was made for a test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.config import ModelConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.plan.model import ModelFacts, model_of
from agentrl.weights.model_files import weight_files

PRETRAINED: Final = 20_000_000
"""Parameters of the smallest model that is taken for a pretrained one."""
LORA_FACTOR: Final = 10
"""Learning rate of an adapter in learning rates of all weights (Schulman et al., LoRA Without Regret, 2025)."""
LEAST_TOKENS: Final = 64
"""Tokens of an answer below which most pretrained models are cut within a sentence."""
LEAST_EPISODES: Final = 32
"""Episodes of a step below which the gradient is mostly noise."""
MOST_MINIBATCHES: Final = 8
_HIGH: Final = 3.0
"""Times the recommended learning rate, above which it is called that of a toy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """Settings for models up to a size."""

    up_to: float
    """Parameters."""
    lr: float
    """Of AdamW, for all weights."""
    source: str
    """Where the learning rate comes from."""
    warmup_steps: int = 4
    """Optimizer steps."""
    group_size: int = 8
    groups_per_step: int = 8
    minibatches: int = 2
    max_tokens: int = 512

    @property
    def lora_lr(self) -> float:
        """Learning rate of an adapter."""
        return self.lr * LORA_FACTOR


DEFAULTS: Final = (
    ModelDefaults(
        up_to=0.4e9,
        lr=1.5e-5,
        source="measured: SmolLM2-135M learns at 1.5e-5 with 8 groups of 8, and collapses in two steps at 5e-5 with 4",
        max_tokens=256,
    ),
    ModelDefaults(up_to=3e9, lr=1e-5, source="AReaL: Qwen2.5-1.5B on GSM8K is best at 1.0e-5 to 1.7e-5"),
    ModelDefaults(
        up_to=float("inf"), lr=1e-6, source="verl and TRL: 1e-6 in most recipes of 3B to 32B", max_tokens=1024, group_size=8
    ),
)
"""By size, the smallest first."""


def defaults_for(parameters: int) -> ModelDefaults:
    """Return the settings for a model of a size.

    Example:
        >>> defaults_for(1_500_000_000).lr
        1e-05
    """
    return next(each for each in DEFAULTS if parameters <= each.up_to)


def count_parameters(model: ModelConfig) -> int:
    """Return the number of parameters of a model, by its config.json or else by the headers of its weights.

    Raises:
        ConfigError: neither is there.
    """
    facts = model_of(model)
    return facts.shape.num_parameters if facts.shape is not None else _stored_parameters(model.directory)


def toy_values(run: RunConfig, model: ModelFacts) -> list[str]:
    """Return the fields of a run that suit a model made for a test and not this one, each with the value that does."""
    parameters = 0 if model.shape is None else model.shape.num_parameters
    if parameters < PRETRAINED:
        return []
    fits, lora = defaults_for(parameters), run.trainer.lora is not None
    lr = fits.lora_lr if lora else fits.lr
    algorithm, size = run.algorithm, f"a model of {spoken(parameters)} parameters"
    found: list[str] = []
    if run.trainer.lr > _HIGH * lr:
        what = f"an adapter of {size}" if lora else size
        found.append(
            f"trainer.lr: {run.trainer.lr:g} suits a toy; {what} learns at about {lr:g} ({fits.source}"
            f"{f'; an adapter takes {LORA_FACTOR} times as much' if lora else ''}); set trainer.lr: {lr:g}"
        )
    if run.sampling.max_tokens < LEAST_TOKENS:
        found.append(
            f"sampling.max_tokens: {run.sampling.max_tokens} suits a toy, or answers of a few words; {size} writes "
            f"sentences, and a cut answer has no end; set sampling.max_tokens: {fits.max_tokens}"
        )
    episodes = algorithm.group_size * algorithm.groups_per_step
    if episodes < LEAST_EPISODES:
        found.append(
            f"algorithm.groups_per_step: {episodes} episodes a step suit a toy; {size} needs more against the noise of its "
            f"gradient; set algorithm.group_size: {fits.group_size} and algorithm.groups_per_step: {fits.groups_per_step}"
        )
    if run.trainer.minibatches > MOST_MINIBATCHES:
        found.append(
            f"trainer.minibatches: {run.trainer.minibatches} steps on a batch suit a toy; the last ones are far from the "
            f"policy that sampled it; set trainer.minibatches: {fits.minibatches}"
        )
    return found


def spoken(parameters: int) -> str:
    """Return a number of parameters as people say it.

    Example:
        >>> spoken(134_515_008), spoken(1_543_714_304)
        ('135M', '1.5B')
    """
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _stored_parameters(path: str) -> int:
    try:
        files = weight_files(Path(path))
    except ConfigError as error:
        raise ConfigError(f"cannot tell the size of {path}: its config.json gives none, and {error}") from error
    count = 0
    for tensors in files.values():
        for tensor in tensors.values():
            elements = 1
            for dimension in tensor.shape:
                elements *= dimension
            count += elements
    return count
