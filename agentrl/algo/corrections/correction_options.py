"""Options of the bundled corrections. No torch: the driver checks them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.base import Config


class CapOptions(Config):
    """Options of `clamp` and `mask`."""

    cap: float = Field(default=5.0, gt=0)
    """Largest weight proximal / behavior of a token."""


class TruncateOptions(Config):
    """Options of `sequence_truncate`."""

    cap: float = Field(default=2.0, gt=0)
    """Largest weight of a segment."""
    segment: Literal["turn", "sample"] = "turn"
    """Tokens whose weights are multiplied."""


class MaskBounds(Config):
    """Two bounds, between which something stays in the loss."""

    low: float = Field(ge=0)
    """Everything below leaves the loss."""
    high: float = Field(gt=0)
    """Everything above leaves the loss."""

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"expected low below high; between {self.low:g} and {self.high:g} no token stays")
        return self


class IcePopOptions(MaskBounds):
    """Options of `icepop`."""

    low: float = Field(default=0.5, ge=0)
    """Tokens of a lower weight leave the loss."""
    high: float = Field(default=5.0, gt=0)
    """Tokens of a higher weight leave the loss."""


class GeometricOptions(MaskBounds):
    """Options of `geometric_mask`."""

    low: float = Field(default=0.99, ge=0)
    """Segments of a lower geometric mean leave the loss."""
    high: float = Field(default=1.001, gt=0)
    """Segments of a higher geometric mean leave the loss."""
    segment: Literal["turn", "sample"] = "turn"
    """Tokens whose mean is taken."""


class M2poMaskOptions(Config):
    """Options of `m2po_mask`."""

    budget: float = Field(default=0.04, gt=0)
    """Largest mean square of the log weights that stay."""
    over: Literal["sample", "microbatch"] = "sample"
    """Tokens that share a budget. `microbatch` is the published code, whose loss depends on the packing."""
