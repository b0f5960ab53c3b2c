"""Warnings of a run that goes wrong while it still runs: what a person would say who looks at the first curves.

Invariant: an alarm changes nothing. Each is one line, names the field to change, and comes once in a run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from agentrl.types import Group, StopReason

logger = logging.getLogger(__name__)

ENTROPY_LEFT: Final = 0.2
"""Share of the entropy of one or two steps before, below which the policy collapses."""
ENTROPY_FLOOR: Final = 0.02
"""Nats per token: a policy that had less is nearly deterministic, and its entropy says nothing."""
SIGNAL_LEFT: Final = 0.5
"""Share of a batch's groups whose returns differ, from which a policy still explores, however little entropy it has."""
KL_JUMP: Final = 10.0
"""Times its median over the steps before, above which KL(behavior, proximal) jumps."""
KL_FLOOR: Final = 0.05
"""Nats per token: a smaller KL is no jump, whatever came before."""
KL_STEPS: Final = 8
"""The number of steps before, of which the median is taken; there must be at least two."""
DRAGGED: Final = -0.06
"""Nats: the mean log(current / behavior) of tokens with positive advantage, below which others drag them down."""
CUT_SHARE: Final = 0.95
"""Share of a batch's answers that end at their limit of tokens."""
FIRST_EPISODES: Final = 32
"""Episodes from the start of a run, in whole batches, of which one must succeed."""


class Alarms:
    """Watches the steps of one process of a run."""

    def __init__(self) -> None:
        self._rung: set[str] = set()
        self._entropies: deque[float] = deque(maxlen=2)
        self._kls: deque[float] = deque(maxlen=KL_STEPS)
        self._episodes = 0
        self._has_succeeded = False

    def step(self, number: int, groups: Sequence[Group], batch: Mapping[str, float], trained: Mapping[str, float]) -> None:
        """Look at a step: `batch` has the metrics of its episodes, `trained` those of the trainer."""
        self._look_at_entropy(number, trained.get("entropy"), batch.get("signal_share", 0.0))
        self._look_at_kl(number, trained.get("kl_behavior_proximal_k3"))
        self._look_at_praised_tokens(number, trained.get("log_ratio_positive"))
        self._look_at_cuts(number, groups)
        self._look_at_success(number, batch)

    def _look_at_entropy(self, number: int, entropy: float | None, signal_share: float) -> None:
        if entropy is None:
            return
        before = max(self._entropies, default=0.0)
        self._entropies.append(entropy)
        if before > ENTROPY_FLOOR and entropy < ENTROPY_LEFT * before and signal_share < SIGNAL_LEFT:
            self._ring(
                "entropy",
                f"step {number}: the entropy of the policy fell from {before:.3g} to {entropy:.3g} nats per token within "
                "two steps. A policy that collapses so fast explores no more: lower trainer.lr, raise trainer.warmup_steps, "
                "or add algorithm.terms: [{entropy: 0.001}]",
            )

    def _look_at_kl(self, number: int, kl: float | None) -> None:
        if kl is None:
            return
        before = list(self._kls)
        self._kls.append(kl)
        if len(before) >= 2 and kl > max(KL_FLOOR, KL_JUMP * median(before)):
            self._ring(
                "kl",
                f"step {number}: KL(behavior, proximal) jumped to {kl:.3g} nats per token, from {median(before):.3g} in the "
                "steps before. The last updates moved the policy too far: lower trainer.lr or algorithm.max_staleness, or "
                "set algorithm.guard",
            )

    def _look_at_praised_tokens(self, number: int, moved: float | None) -> None:
        if moved is not None and moved < DRAGGED:
            self._ring(
                "praised",
                f"step {number}: tokens with positive advantage lost probability since they were sampled, {moved:.3g} nats "
                "on average, where they should gain. Pushes against other tokens drag them down, and success falls a few "
                "steps later: set algorithm.policy_loss: anchored, or lower algorithm.max_staleness or trainer.lr",
            )

    def _look_at_cuts(self, number: int, groups: Sequence[Group]) -> None:
        turns = [turn for group in groups for episode in group.episodes for turn in episode.turns if turn.in_loss]
        answers = [turn for turn in turns if len(turn.output_ids) > 1]  # a limit of one token is a choice between tokens
        cut = sum(turn.stop_reason == StopReason.LENGTH for turn in answers)
        if answers and cut >= CUT_SHARE * len(answers):
            self._ring(
                "cut",
                f"step {number}: {cut} of {len(answers)} answers were cut by their limit of tokens, so the policy hardly "
                "ever ends one by itself: raise sampling.max_tokens (or the max_tokens that the workflow asks for), or look "
                "whether the model writes its end token",
            )

    def _look_at_success(self, number: int, batch: Mapping[str, float]) -> None:
        if self._has_succeeded:
            return
        rate = batch.get("success_rate")
        self._has_succeeded = bool(rate)
        self._episodes += int(batch.get("episodes", 0))
        if rate == 0 and self._episodes >= FIRST_EPISODES:
            self._ring(
                "success",
                f"step {number}: none of the first {self._episodes} episodes succeeded. Look at one (agentrl view): does "
                "the reward recognize a right answer? If it does, set tasks to easier ones, raise algorithm.group_size, or "
                "set model.path to a model that sometimes succeeds",
            )

    def _ring(self, alarm: str, text: str) -> None:
        if alarm not in self._rung:
            self._rung.add(alarm)
            logger.warning("%s", text)
