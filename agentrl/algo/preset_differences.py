"""How a run that names a preset differs from the preset's source, for `--dry-run`."""

from __future__ import annotations

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.presets import FORKS, OVERLONG, PRESETS, STALE


def preset_differences(algorithm: AlgorithmConfig, minibatches: int) -> list[str]:
    """Return a line for each difference, those that fields beside the preset make included; empty without a preset."""
    if algorithm.preset_name is None:
        return []
    preset = PRESETS[algorithm.preset_name]
    pure = AlgorithmConfig.model_validate({"group_size": algorithm.group_size, **preset.fields})
    lines = [line for line in preset.differences if not _is_gone(line, algorithm)]
    if preset.minibatches not in (None, minibatches):
        lines.append(f"trainer.minibatches is {minibatches}; in the source it is {preset.minibatches}")
    for name in ("keep", "shaping", "advantage", "normalize", "policy_loss", "correction", "terms", "aggregate", "guard"):
        mine, own = getattr(algorithm, name), getattr(pure, name)
        if mine != own:
            lines.append(f"algorithm.{name} is {mine}, as the run file says; in the preset it is {own}")
    return lines


def _is_gone(line: str, algorithm: AlgorithmConfig) -> bool:
    """Return whether fields of the run file take a difference away."""
    slots = algorithm.slots
    if line == OVERLONG:
        return slots.shaping.name == "soft_overlong"
    if line == FORKS:
        return slots.aggregate != "sequence"
    if line == STALE:
        return algorithm.max_staleness == 0 or slots.recomputes_proximal
    return False
