"""The books of an interrupted run: what the server says it sampled against what was recorded and what would be trained.

Invariant: when `check_accounts` returns, every completion the server finished is exactly one turn, with its ids, log-probs
and version spans, and every token of every turn is trained exactly once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.tokens.verify import verify
from agentrl.types import Sample, Trajectory, Turn
from tests.support.tap import Served


def check_accounts(trajectories: Sequence[Trajectory], served: Sequence[Served]) -> None:
    """Compare what was recorded, and what would be trained, with what the server says it sampled.

    Raises:
        AssertionError: a token is lost, duplicated, or carries another version or log-prob than the server gave it.
        InvariantError: a trajectory is not what was sent.
    """
    said: dict[tuple[int, ...], list[Served]] = {}
    for one in served:
        if one.completion_tokens != len(one.output_ids):
            raise AssertionError(f"request {one.rid}: {one.completion_tokens} completion tokens, {len(one.output_ids)} ids")
        said.setdefault(one.output_ids, []).append(one)
    for trajectory in trajectories:
        verify(trajectory)
        _check_trained_once(trajectory)
        for index, turn in enumerate(trajectory.turns):
            place = f"episode {trajectory.episode_id}, turn {index}"
            spans = tuple((span.start, span.end, span.version) for span in turn.spans)
            _check_spans(spans, len(turn.output_ids), place)
            candidates = said.get(tuple(turn.output_ids.tolist()), [])
            same = [one for one in candidates if one.spans == spans and _equal(one.logprobs, turn)]
            if not same:
                found = [one.spans for one in candidates]
                raise AssertionError(
                    f"{place}: {len(turn.output_ids)} tokens with spans {spans} were recorded; the server sampled these ids "
                    f"{len(found)} times more, with spans {found}" + (" and other log-probs" if spans in found else "")
                )
            candidates.remove(same[0])
    rest = [one for some in said.values() for one in some]
    if rest:
        raise AssertionError(f"{len(rest)} completions were sampled and never recorded, such as request {rest[0].rid}")


def _check_trained_once(trajectory: Trajectory) -> None:
    trained: Counter[tuple[int, int]] = Counter()
    for sample in trajectory.branches():
        at = sample.loss_mask
        trained.update(zip(sample.turn_index[at].tolist(), positions(sample)[at].tolist(), strict=True))
    for index, turn in enumerate(trajectory.turns):
        times = [trained.pop((index, position), 0) for position in range(len(turn.output_ids))]
        if set(times) != {1}:
            raise AssertionError(
                f"episode {trajectory.episode_id}, turn {index}: its tokens are trained {times} times; expected once each"
            )
    if trained:
        raise AssertionError(f"episode {trajectory.episode_id}: (turn, position) {sorted(trained)[:5]} was never sampled")


def _equal(logprobs: tuple[float, ...], turn: Turn) -> bool:
    return np.array_equal(np.array(logprobs, np.float32), turn.output_logprobs)


def split_turns(trajectories: Sequence[Trajectory]) -> int:
    """Return how many turns have tokens of more than one version."""
    return sum(len(turn.spans) > 1 for trajectory in trajectories for turn in trajectory.turns)


def cut_versions(trajectories: Sequence[Trajectory]) -> set[int]:
    """Return the versions whose arrival cut a turn: tokens sampled before it and tokens sampled after it."""
    return {
        version
        for trajectory in trajectories
        for turn in trajectory.turns
        for version in range(turn.spans[0].version + 1, turn.spans[-1].version + 1)
    }


def _check_spans(spans: Sequence[tuple[int, int, int]], count: int, place: str) -> None:
    ends = [0, *(end for _, end, _ in spans)]
    versions = [version for _, _, version in spans]
    whole = all(start == end for (start, _, _), end in zip(spans, ends, strict=False)) and ends[-1] == count
    if not whole or sorted(set(versions)) != versions or any(start >= end for start, end, _ in spans):
        raise AssertionError(f"{place}: spans {list(spans)} over {count} tokens; expected each once, versions rising")


def positions(sample: Sample) -> NDArray[np.int64]:
    """Return, [L], the index of each sampled token in the output of its turn; -1 where not sampled."""
    result = np.full(len(sample.token_ids), -1, np.int64)
    seen: Counter[int] = Counter()
    for at in np.flatnonzero(sample.token_versions >= 0).tolist():
        turn = int(sample.turn_index[at])
        result[at] = seen[turn]
        seen[turn] += 1
    return result
