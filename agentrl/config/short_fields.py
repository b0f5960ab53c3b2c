"""The fields of `algorithm` that only fill slots, such as `preset` and `clip_low`, as people read about them."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algo.advantages import ADVANTAGES
from agentrl.algo.corrections import CORRECTIONS
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.presets import PRESETS, SHORT, SHORT_CORRECTION
from agentrl.algo.slots import Bundled
from agentrl.config.describe import ConfigField, config_fields


def short_fields() -> list[ConfigField]:
    """Return each of them, with the option that it fills."""
    names = ", ".join(PRESETS)
    mode, cap = SHORT_CORRECTION
    [option] = [field for field in config_fields(CORRECTIONS["mask"].options) if field.name == "cap"]
    return [
        _slot_field("preset", "Fills several slots as a published algorithm does; fields beside it win.", f"one of {names}"),
        *(_option(name, slot, option) for name, (slot, option, _) in SHORT.items()),
        _slot_field(
            mode, "Name in `correction.token`: weights above the cap become 0, or the cap.", "one of mask, clamp", "mask"
        ),
        _slot_field(cap, f"`cap` of `correction.token`. {option.meaning}", option.type, option.default),
    ]


def _option(name: str, slot: str, option: str) -> ConfigField:
    table: Mapping[str, Bundled] = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES}[slot]
    takers = [taker for taker, bundled in table.items() if option in bundled.options.model_fields]
    [first] = [field for field in config_fields(table[takers[0]].options) if field.name == option]
    meaning = f"`{option}` of `algorithm.{slot}`, for {', '.join(takers)}. {first.meaning}"
    return _slot_field(name, meaning, first.type, first.default)


def _slot_field(name: str, meaning: str, kind: str, default: str | None = "null") -> ConfigField:
    return ConfigField(path=f"algorithm.{name}", meaning=meaning, type=kind, unit=None, default=default)
