"""The loss of a run file's default slots, as a function of tensors with a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.loss_batch import LossBatch, LossTotals
from agentrl.algo.loss_metrics import Marks
from agentrl.algo.objective import LossOutput, Objective


@dataclass(frozen=True)
class PpoNumbers:
    """What the default slots of a config say."""

    clip_low: float
    clip_high: float
    cap: float
    mode: str

    @classmethod
    def of(cls, config: AlgorithmConfig) -> PpoNumbers:
        slots = config.slots
        assert (slots.policy_loss.name, slots.policy_loss.bundled is None) == ("ppo", False)
        clips, caps = {"clip_low": 0.2, "clip_high": 0.2, **slots.policy_loss.given}, {"cap": 5.0, **slots.token.given}
        return cls(float(str(clips["clip_low"])), float(str(clips["clip_high"])), float(str(caps["cap"])), slots.token.name)


def decoupled_ppo_loss(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: int,
    config: AlgorithmConfig,
    fresh: Tensor | None = None,
    interrupted: Tensor | None = None,
    ages: Tensor | None = None,
    turns: Tensor | None = None,
) -> LossOutput:
    """Return the loss of the tokens where `loss_mask` is True; `num_loss_tokens` are those of the minibatch."""

    def chosen(values: Tensor) -> Tensor:
        picked = values[loss_mask]
        return picked.float() if picked.dtype == torch.bfloat16 else picked

    def marked(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[loss_mask]

    current = chosen(current_logprobs)
    zeros = torch.zeros(len(current), dtype=torch.int64)
    batch = LossBatch(
        current_logprobs=current,
        proximal_logprobs=chosen(proximal_logprobs).detach(),
        behavior_logprobs=chosen(behavior_logprobs).detach(),
        advantages=chosen(advantages).detach(),
        ages=zeros,
        turn=zeros,
        sample=torch.arange(len(current)),
        group=zeros,
        role=zeros,
        player=zeros,
        rewards=torch.zeros(len(current)),
        totals=LossTotals(tokens=num_loss_tokens, turns=1, samples=1),
    )
    marks = Marks(fresh=marked(fresh), interrupted=marked(interrupted), ages=marked(ages), turns=marked(turns))
    return Objective(config)(batch, marks=marks)
