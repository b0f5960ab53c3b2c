"""The bundled functions of groups, by name: those of `algorithm.keep` and of `algorithm.shaping`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.algo.slots import Bundled
from agentrl.config.base import Config


class OverlongOptions(Config):
    """Options of `soft_overlong`."""

    limit: int = Field(ge=1)
    """Sampled tokens from which on the whole punishment is paid, such as those after which answers are cut off."""
    cache: int | None = Field(default=None, ge=1)
    """Tokens below the limit over which the punishment grows; none: a fifth of the limit, as in the paper."""
    weight: float = Field(default=1.0, gt=0)
    """The whole punishment."""
    over: Literal["episode", "turn"] = "episode"
    """What has a length: all turns of a player in an episode together, or each turn."""


class TruncatedOptions(Config):
    """Options of `mask_truncated`."""

    over: Literal["episode", "turn"] = "episode"
    """What leaves the loss: all turns of an episode that was cut short, or turns that were cut off, alone."""


KEEPS: dict[str, Bundled] = {
    "all": Bundled(function="agentrl.algo.keeps:every_group", formula="all groups"),
    "mixed": Bundled(
        function="agentrl.algo.keeps:mixed",
        formula="groups with an advantage other than 0",
        needs=frozenset({"advantages"}),
    ),
}

SHAPINGS: dict[str, Bundled] = {
    "none": Bundled(function="agentrl.algo.shaped_groups:unshaped", formula="rewards as they are"),
    "soft_overlong": Bundled(
        function="agentrl.algo.shaped_groups:soft_overlong",
        options=OverlongOptions,
        formula="reward less up to {weight}, from below {limit} sampled tokens of each {over} on (cache {cache})",
    ),
    "mask_truncated": Bundled(
        function="agentrl.algo.shaped_groups:mask_truncated",
        options=TruncatedOptions,
        formula="each {over} that was cut off leaves the loss",
    ),
}
