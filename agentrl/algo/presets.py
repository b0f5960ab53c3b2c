"""What fills slots under a name of its own: presets, with the sources of their values, and short fields such as `clip_low`.

Invariant: both fill slots and nothing else, and every field of the run file beside a preset wins. What a preset does
otherwise than its source is in `differences`, which `--dry-run` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentrl.algo.advantages import ADVANTAGES
from agentrl.algo.corrections import correction_parts
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.algo.slots import Bundled, slot_name, slot_value, with_option

FORKS: Final = (
    "a branch counts as a response: an episode that forks k times counts k + 1 times; with aggregate: token it does not"
)
SEVERAL_TURNS: Final = "a response is all turns of a branch, and one advantage is for all of them"
STALE: Final = (
    "the data may be of earlier versions, and the ratio is to the policy that sampled, as in the paper; decoupled PPO is "
    "correction: {proximal: forward, token: mask}"
)
OVERLONG: Final = (
    "no punishment for overlong answers, as no limit is known: shaping: {soft_overlong: {limit: N}}, N the tokens at which "
    "they are cut off"
)
SHORT: Final = {
    "discount": ("advantage", "discount", 1.0),
    "normalize_std": ("advantage", "normalize_std", False),
    "clip_low": ("policy_loss", "clip_low", 0.2),
    "clip_high": ("policy_loss", "clip_high", 0.2),
}
"""Short fields: the slot and the option that they fill, and the value that says nothing."""
SHORT_CORRECTION: Final = ("behavior_weight_mode", "behavior_weight_cap")
_AROUND_SAMPLER: Final = {"proximal": "behavior", "token": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A combination that has a name."""

    fields: Mapping[str, object]
    """Fields of `algorithm`."""
    source: str
    """Where the values are from."""
    differences: tuple[str, ...] = ()
    """What is otherwise than in the source, a line each."""
    minibatches: int | None = None
    """`trainer.minibatches` of the source, which is no slot; None: the source has no such number."""


PRESETS: Mapping[str, Preset] = {
    "areal_boba2": Preset(
        fields={
            "advantage": {"reinforce_plus_plus": {"baseline": "none"}},
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}},
            "correction": {"proximal": "forward", "token": {"mask": {"cap": 5.0}}},
            "aggregate": "token",
        },
        source="AReaL boba2, run file: no critic, no group baseline, advantages normalized over the tokens of the batch, "
        "decoupled PPO (arXiv 2505.24298, section 5), clip 0.2, behavior weights up to 5",
        differences=("rewards are not multiplied by 5, which the normalization takes out again",),
        minibatches=1,
    ),
    "ppo": Preset(
        fields={
            "advantage": {"turn_gae": {"discount": 1.0, "trace": 0.95}},
            "critic": {"model": "head"},
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}},
            "terms": [{"value": {"weight": 0.5, "clip": 0.2}}],
            "aggregate": "token",
        },
        source="Schulman et al., arXiv 1707.06347, clip 0.2 and trace 0.95",
        differences=(
            "a step of the estimate is a turn and not a token; with advantage: token_gae it is a token",
            "the ratio is to the weights before the batch, with the weight of decoupled PPO for older data",
        ),
    ),
    "grpo": Preset(
        fields={
            "advantage": "grpo",
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}},
            "correction": _AROUND_SAMPLER,
            "aggregate": "sequence",
        },
        source="Shao et al., arXiv 2402.03300, equation 3",
        differences=(
            "no KL penalty to a reference; with reference: {} and terms: [{kl: {weight: 0.04, k: 3}}] it is there",
            SEVERAL_TURNS,
            FORKS,
            STALE,
        ),
    ),
    "drgrpo": Preset(
        fields={
            "advantage": "dr_grpo",
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}},
            "correction": _AROUND_SAMPLER,
            "aggregate": {"fixed": 3000},
        },
        source="Liu et al., arXiv 2503.20783, section 3.2; the divisor is the 3,000 tokens that their answers may have",
        differences=(
            "the divisor is that of the paper's answers; yours: aggregate: {fixed: N}, N the most tokens of an episode",
            SEVERAL_TURNS,
            "the divisor counts branches and not episodes, of which one that forks has several",
            STALE,
        ),
    ),
    "dapo": Preset(
        fields={
            "keep": "mixed",
            "advantage": "grpo",
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.28}},
            "correction": _AROUND_SAMPLER,
            "aggregate": "token",
        },
        source="Yu et al., arXiv 2503.14476, section 3: clip-higher, dynamic sampling, mean over tokens, length punishment",
        differences=(
            OVERLONG,
            "the batch is filled up after keep's max_groups_per_step, where the paper samples until it is full",
            SEVERAL_TURNS,
            STALE,
        ),
    ),
    "gspo": Preset(
        fields={
            "advantage": "grpo",
            "policy_loss": {"gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "segment": "sample"}},
            "correction": _AROUND_SAMPLER,
            "aggregate": "sequence",
        },
        source="Zheng et al., arXiv 2507.18071, section 5.1: clip 3e-4 and 4e-4 of whole responses, mean over them",
        differences=(
            "the gradient of a token is its own, as in equation 14 (GSPO-token); with one advantage it is that of GSPO",
            SEVERAL_TURNS,
            FORKS,
            STALE,
        ),
        minibatches=4,
    ),
    "prime_rl": Preset(
        fields={
            "advantage": "dr_grpo",
            "policy_loss": "dppo_tv",
            "correction": {"proximal": "behavior", "token": "none"},
            "terms": [{"log_ratio": {"weight": 1e-3}}],
            "aggregate": "token",
        },
        source="prime-rl, trainer/rl/loss.py, default_loss_fn: DPPO-TV 0.2/0.2 and 1e-3 * (log w)^2",
    ),
    "vcpo": Preset(
        fields={
            "advantage": {"off_policy_baseline": {"normalize_std": True}},
            "policy_loss": "reinforce",
            "correction": {"token": "none", "sequence": {"sequence_truncate": {"cap": 8.0, "segment": "sample"}}},
            "aggregate": "sequence",
            "guard": {"effective_samples": {"base": 1.0}},
        },
        source="VCPO, arXiv 2602.17616, and its script for MATH: weights up to 8, baseline over spread, ESS base 1",
        differences=(
            "the baseline weighs by sums of (1 - p)^2, where the authors take the norm of each trajectory's gradient",
            FORKS,
        ),
    ),
}


def without_short_fields(given: Mapping[str, Any], preset: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields that slots have: those of the preset, then those that were given, short ones in their slots."""
    fields = {**preset, **given}
    tables: dict[str, Mapping[str, Bundled]] = {"advantage": ADVANTAGES, "policy_loss": POLICY_LOSSES}
    standard = {"advantage": "episode", "policy_loss": "ppo"}
    for short, (slot, option, silent) in SHORT.items():
        if short not in fields:
            continue
        number = fields.pop(short)
        value = slot_value(f"algorithm.{slot}", fields.get(slot, standard[slot]), tables[slot])
        bundled = tables[slot].get(slot_name(value))
        if bundled is None or option not in bundled.options.model_fields:
            if number == silent:
                continue
            takers = ", ".join(name for name, each in tables[slot].items() if option in each.options.model_fields)
            raise ValueError(
                f"algorithm.{short}: {slot} {slot_name(value)} has no option {option}; remove {short}, or choose one of "
                f"{takers}"
            )
        if slot in given and not isinstance(value, str) and option in value[slot_name(value)]:
            raise ValueError(f"algorithm.{short}: {slot} {slot_name(value)} has {option} of its own; remove one of the two")
        fields[slot] = with_option(value, option, number)
    short = {name: fields.pop(name) for name in SHORT_CORRECTION if name in fields}
    if short:
        parts = correction_parts(fields.get("correction", {}))
        if "token" in parts and "correction" in given:
            raise ValueError(
                f"algorithm.{next(iter(short))}: correction has a part `token` of its own; remove one of the two"
            )
        mode, cap = short.get("behavior_weight_mode", "mask"), short.get("behavior_weight_cap")
        if mode not in ("clamp", "mask"):
            raise ValueError(f"algorithm.behavior_weight_mode: expected clamp or mask, got {mode!r}")
        fields["correction"] = {**parts, "token": mode if cap is None else {mode: {"cap": cap}}}
    return fields
