"""Proves that a trajectory holds the requests that were sent and the tokens that were sampled.

Invariant: `verify` returns only if the turns above each turn reproduce the recorded digest of its request, every sampled
token is trained at most once, and versions and masks agree with the turns.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import orjson

from agentrl.episode.checks import check_turn
from agentrl.errors import InvariantError
from agentrl.types import Int32Array, Sample, Trajectory


class RequestDigest(NamedTuple):
    """The digest of the ids of a request, and their number."""

    value: bytes
    num_ids: int


def verify(trajectory: Trajectory, *, has_digests: bool = True) -> list[Sample]:
    """Check a trajectory against the requests recorded in it and return its branches, as `Trajectory.branches` does.

    Without `has_digests`, as in a record of an episode that was not trained, nothing proves the requests.

    Raises:
        InvariantError: the trajectory contradicts itself; the message names the episode, the turn and the contradiction.
    """
    where = f"episode {trajectory.episode_id}"
    for index, turn in enumerate(trajectory.turns):
        place = f"{where}, turn {index}"
        if not 0 <= turn.sent_after <= index:
            raise InvariantError(f"{place}: it was sent after {turn.sent_after} turns; expected 0 to {index}")
        if turn.parent is not None and not 0 <= turn.parent < turn.sent_after:
            raise InvariantError(f"{place}: its parent is turn {turn.parent}; expected one of the first {turn.sent_after}")
        check_turn(turn, None if turn.parent is None else trajectory.turns[turn.parent], place)
    requests = request_digests(trajectory) if has_digests else []
    for index, (request, turn) in enumerate(zip(requests, trajectory.turns, strict=has_digests)):
        if request.value != turn.prompt_digest:
            raise InvariantError(
                f"{where}, turn {index}: the recorded ids are not the request that was sent: digest "
                f"{request.value.hex()} of {request.num_ids} context ids, recorded {turn.prompt_digest.hex() or 'none'}"
            )
    return _verified_branches(trajectory, where)


def request_digests(trajectory: Trajectory) -> list[RequestDigest]:
    """Return the digest of each turn's request, as `Turn.prompt_digest`, by the ids that are recorded above the turn."""
    states: list[_Digest] = []
    found: list[RequestDigest] = []
    for turn in trajectory.turns:
        state = _Digest() if turn.parent is None else states[turn.parent].copy()
        state.add(turn.context_ids)
        found.append(RequestDigest(state.value(), state.count))
        state.add(turn.output_ids)
        states.append(state)
    return found


def trained_digests(sample: Sample) -> dict[int, str]:
    """Return, for each turn of a branch that sampled tokens, the digest of the trainer's input.

    It covers the ids from the root to the end of the turn, and the log-probs, versions and temperatures of its output.
    """
    found: dict[int, str] = {}
    state, at = hashlib.blake2b(digest_size=16), 0
    sampled = np.flatnonzero(sample.token_versions >= 0)
    turns = sample.turn_index[sampled]
    for places in np.split(sampled, np.flatnonzero(np.diff(turns)) + 1) if len(sampled) else ():
        start, end = int(places[0]), int(places[-1]) + 1
        state.update(sample.token_ids[at:end].astype("<i4").tobytes())
        at, own = end, state.copy()
        own.update(sample.behavior_logprobs[start:end].astype("<f4").tobytes())
        own.update(sample.token_versions[start:end].astype("<i4").tobytes())
        own.update(sample.temperatures[start:end].astype("<f4").tobytes())
        found[int(sample.turn_index[start])] = own.hexdigest()
    return found


class _Digest:
    """Running digest of decimal, comma-joined ids."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=16)
        self.count = 0

    def copy(self) -> _Digest:
        copy = _Digest()
        copy._state, copy.count = self._state.copy(), self.count
        return copy

    def add(self, ids: Int32Array) -> None:
        if len(ids):
            text = orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
            self._state.update(b"," + text if self.count else text)
            self.count += len(ids)

    def value(self) -> bytes:
        return self._state.digest()


def _verified_branches(trajectory: Trajectory, where: str) -> list[Sample]:
    samples = trajectory.branches()
    trained = np.zeros(len(trajectory.turns), np.int64)
    for sample in samples:
        lengths = {
            len(values)
            for values in (
                sample.token_ids,
                sample.loss_mask,
                sample.behavior_logprobs,
                sample.token_versions,
                sample.turn_index,
                sample.temperatures,
            )
        }
        if len(lengths) != 1:
            raise InvariantError(f"{where}: arrays of a branch have lengths {sorted(lengths)}")
        sampled = sample.token_versions >= 0
        if bool((sample.loss_mask & ~sampled).any()):
            raise InvariantError(f"{where}: the loss mask covers a token that was not sampled")
        if bool((np.diff(sample.token_versions[sampled]) < 0).any()):
            raise InvariantError(f"{where}: policy versions go back along a branch")
        trained += np.bincount(sample.turn_index[sample.loss_mask], minlength=len(trajectory.turns))
    expected = [len(turn.output_ids) if turn.in_loss else 0 for turn in trajectory.turns]
    if trained.tolist() != expected:
        raise InvariantError(f"{where}: tokens trained by turn are {trained.tolist()}, sampled were {expected}")
    return samples
