"""Options of the bundled advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.base import Config


class EpisodeOptions(Config):
    """Options of `episode`."""

    group_size: int | None = Field(default=None, ge=1)
    """Episodes of a whole group, `algorithm.group_size`; scales the advantages of a group that lost members."""
    normalize_std: bool = False
    """Divide by the root mean square over the episodes and players of the group."""


class TurnOptions(Config):
    """Options of `turn`."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor for each turn that was sent between a turn and a reward."""
    normalize_std: bool = False
    """Divide by the root mean square over all turns of the group."""


class OptimalBaselineOptions(Config):
    """Options of `optimal_baseline`."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor for each turn that was sent between a turn and a reward."""


class GrpoOptions(Config):
    """Options of `grpo`."""

    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""


class ReinforcePlusPlusOptions(Config):
    """Options of `reinforce_plus_plus`."""

    baseline: Literal["none", "group"] = "none"
    """`group` subtracts the mean of the group before the batch is normalized."""


class OffPolicyOptions(Config):
    """Options of `off_policy_baseline`."""

    leave_one_out: bool = False
    """Leave an episode out of its own baseline: nothing is biased, and one that outweighs the others keeps its noise."""
    normalize_std: bool = False
    """Divide by the standard deviation of the group's returns, over n."""


class PassAtKOptions(Config):
    """Options of `pass_at_k`."""

    k: int = Field(default=2, ge=2)
    """Attempts that are graded together by their best; at most the episodes of a group."""


class GaeOptions(Config):
    """Options of `turn_gae` and `token_gae`."""

    discount: float = Field(default=1.0, ge=0, le=1)
    """Discount of a step: a turn, or a token."""
    trace: float = Field(default=0.95, ge=0, le=1)
    """Lambda: 1 is the return less the value, 0 the error of one step."""
