"""The episodes that a simulated run plays: recorded ones drawn again, or lengths from a distribution.

Invariant: the groups of one workload and one seed are always the same, whatever the simulated cluster, so that two clusters
play the same episodes. Lengths are those of a fixed policy: a policy that learns longer answers is not in the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """One model call of an episode, and what comes before it."""

    outside_s: float
    """Seconds before the call in which no server works for the episode: tools, environment, client."""
    context_tokens: int
    """Tokens that the call adds to the context."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """One attempt at a task."""

    turns: tuple[PlayedTurn, ...]
    after_s: float = 0.0
    """Seconds between the last call and the end: the score."""
    episode_return: float | None = None
    """None: unknown, so its group never has zero variance."""
    failed: bool = False
    """Whether the attempt ends without a result."""

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)

    @property
    def tokens(self) -> int:
        """Tokens of contexts and outputs, each counted once."""
        return self.output_tokens + sum(turn.context_tokens for turn in self.turns)


class EpisodeSource(Protocol):
    """The source of the episodes of groups."""

    def attempts(self, group: int, member: int) -> Sequence[PlayedEpisode]:
        """Return the attempts of a member, each played where the one before fails; groups of evaluations are negative."""
        ...


class RecordedSource:
    """Draws recorded groups, and within each its own episodes, so that hard tasks stay long together."""

    def __init__(self, groups: Mapping[int, Sequence[PlayedEpisode]], *, retries: int, seed: int) -> None:
        self._groups = [list(episodes) for _, episodes in sorted(groups.items())]
        self._retries, self._seed = retries, seed

    def attempts(self, group: int, member: int) -> Sequence[PlayedEpisode]:
        """Return draws from one recorded group: each episode once before any is drawn again."""
        rng = np.random.default_rng((self._seed, group & 0x7FFFFFFF, int(group < 0)))
        chosen = self._groups[int(rng.integers(len(self._groups)))]
        order = rng.permutation(len(chosen))
        count = self._retries + 1
        return [chosen[int(order[(member + again) % len(chosen)])] for again in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalSource:
    """Episodes of equal turns with lognormal output lengths, cut off at `max_tokens`; no attempt fails."""

    mean_tokens: float
    """Output tokens of an episode, mean before the cut."""
    spread: float
    """Standard deviation of the logarithm; 0: all episodes are equally long."""
    max_tokens: int
    context_tokens: int
    """Context tokens of a turn that it does not share with the turn before."""
    turns: int = 1
    outside_s: float = 0.0
    """Seconds before each turn in which no server works."""
    seed: int = 0

    def attempts(self, group: int, member: int) -> Sequence[PlayedEpisode]:
        rng = np.random.default_rng((self.seed, group & 0x7FFFFFFF, int(group < 0), member))
        center = np.log(self.mean_tokens) - self.spread**2 / 2
        length = int(min(self.max_tokens, max(self.turns, round(float(rng.lognormal(center, self.spread))))))
        share, rest = divmod(length, self.turns)
        turns = tuple(
            PlayedTurn(self.outside_s, self.context_tokens, share + (number < rest)) for number in range(self.turns)
        )
        return [PlayedEpisode(turns)]
