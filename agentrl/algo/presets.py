"""Named combinations of slots, each with the source of its values.

Invariant: a preset fills slots and nothing else, and every field of the run file beside it wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A combination that has a name."""

    fields: Mapping[str, object]
    """Fields of `algorithm`."""
    source: str
    """Where the values are from."""


PRESETS: Mapping[str, Preset] = {
    "areal_boba2": Preset(
        fields={
            "advantage": {"episode": {"normalize_std": True}},
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}},
            "correction": {"proximal": "forward", "token": {"mask": {"cap": 5.0}}},
            "aggregate": "token",
        },
        source="AReaL, arXiv 2505.24298, section 5 and table 6: decoupled PPO, clip 0.2, behavior weights up to 5",
    ),
    "ppo": Preset(
        fields={
            "advantage": {"turn_gae": {"discount": 1.0, "trace": 0.95}},
            "critic": {"model": "head"},
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}},
            "terms": [{"value": {"weight": 0.5, "clip": 0.2}}],
            "aggregate": "token",
        },
        source="Schulman et al., arXiv 1707.06347, clip 0.2 and trace 0.95; over turns, around the proximal policy",
    ),
    "grpo": Preset(
        fields={
            "advantage": "grpo",
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}},
            "aggregate": "sequence",
        },
        source="Shao et al., arXiv 2402.03300, equation 3, without the KL penalty",
    ),
    "drgrpo": Preset(
        fields={"advantage": "dr_grpo", "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.2}}, "aggregate": "token"},
        source="Liu et al., arXiv 2503.20783, section 3.2; its fixed divisor is aggregate: {fixed: N}",
    ),
    "dapo": Preset(
        fields={
            "keep": "mixed",
            "advantage": "grpo",
            "policy_loss": {"ppo": {"clip_low": 0.2, "clip_high": 0.28}},
            "aggregate": "token",
        },
        source="Yu et al., arXiv 2503.14476, section 3: clip-higher, dynamic sampling, mean over tokens",
    ),
    "gspo": Preset(
        fields={
            "advantage": "grpo",
            "policy_loss": {"gspo": {"clip_low": 3e-4, "clip_high": 4e-4}},
            "aggregate": "sequence",
        },
        source="Zheng et al., arXiv 2507.18071, section 5.1: clip 3e-4 and 4e-4, mean over sequences",
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
    ),
}
