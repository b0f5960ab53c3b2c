"""Settings of the models beside the policy: a critic, whose values advantages need, and a reference policy.

Invariant: neither is ever sent to a server.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from agentrl.config.base import Config

LR_FACTOR: Final = 10
"""A critic's learning rate over that of the policy, where none is given: its head begins at 0."""


class CriticConfig(Config):
    """A critic, which predicts the return from the tokens before a token; the term `value` trains it."""

    model: Literal["head", "trunk", "own"] = "head"
    """`head`: a linear head on the hidden states of the policy, which it leaves alone. `trunk`: its loss trains the policy's
    weights too. `own`: a second copy of `model.path` with a head."""
    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of its AdamW; none: ten times `trainer.lr`."""
    warmup_steps: int = Field(default=0, ge=0)
    """First batches of the run, from which the critic learns alone and the policy stays as it is."""
