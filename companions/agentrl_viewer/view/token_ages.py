"""A pass over the records of a run that keeps little of each: the ages of trained tokens.

Invariant: a pass holds one record at a time, and what one step trained.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from agentrl.episode.summary import TrainedEpisode, TrainedTurn
from agentrl.observe.runs.reading import read_index, read_record_lines, read_trained_lines


class SpansOfTurn(msgspec.Struct, frozen=True):
    """The policy versions of a turn, and how it was sampled."""

    spans: list[tuple[int, int, int]]
    """Start, end and version of each."""
    temperature: float
    """0: greedy, and so not trained."""


class SpansOfEpisode(msgspec.Struct, frozen=True):
    """The policy versions of an episode's turns."""

    turns: list[SpansOfTurn]


_TRAINED: Final = msgspec.json.Decoder(TrainedEpisode)
_SPANS: Final = msgspec.json.Decoder(SpansOfEpisode)


def trained_ages(run_dir: Path, step: int) -> Counter[int]:
    """Return how many output tokens of each age a step trained.

    The age of a token is the version that was trained minus the one that sampled it. Empty where no record is kept of what
    the step trained.
    """
    by_id = {found.episode_id: found for found in map(_TRAINED.decode, read_trained_lines(run_dir, step))}
    wanted = [summary for summary in read_index(run_dir) if summary.episode_id in by_id]
    ages: Counter[int] = Counter()
    for found in read_record_lines(run_dir, wanted):
        episode = by_id[found.summary.episode_id]
        for turn, trained in zip(_SPANS.decode(found.record).turns, episode.turns, strict=True):
            for start, end, version in turn.spans:
                if count := _count_trained(turn, trained, start, end):
                    ages[episode.policy_version - version] += count
    return ages


def _count_trained(turn: SpansOfTurn, trained: TrainedTurn, start: int, end: int) -> int:
    """Return how many tokens of a span were in the loss: the page's `isTrained` decides the same for one token."""
    if trained.advantage is None or turn.temperature <= 0:
        return 0
    if trained.proximal_logprobs is None:
        return end - start
    return sum(logprob is not None for logprob in trained.proximal_logprobs[start:end])
