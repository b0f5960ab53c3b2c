"""Cassettes of episodes: made from an episode, and compared with a replay of it.

Invariant: a replay asks no model, and runs neither an environment nor a tool that carries no state, if the tape has it. It
is equal to its record byte by byte, or each difference is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import msgspec
import orjson

from agentrl.client import Client, ReplayBackend
from agentrl.episode.codec import encode_line, stored_trajectory, trajectory_record
from agentrl.episode.summary import EndedEpisode
from agentrl.episode.tape import Cassette, Player, Recorder, TapedAnswer, using_tape
from agentrl.errors import ConfigError
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_client_episode
from agentrl.types import Trajectory
from agentrl.workflow import RolloutWorkflow


def make_cassette(trajectory: Trajectory, tape: Recorder, *, workflow: str, workflow_args: dict[str, object]) -> Cassette:
    """Return the cassette of an episode that ended without a failure."""
    # Written, read and written again: a value that JSON has no form for is its repr from the first replay on.
    record = timeless_record(stored_trajectory(timeless_record(trajectory)))
    return Cassette(workflow=workflow, workflow_args=workflow_args, answers=tape.answers, episode=msgspec.Raw(record))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """The outcome of a replay."""

    trajectory: Trajectory
    diverged: tuple[str, ...]
    """Actions of the workflow that were not recorded; the episode has no reward then."""


async def replay_trajectory(
    workflow: RolloutWorkflow, recorded: Trajectory, tape: Player, *, timeout_s: float
) -> ReplayedEpisode:
    """Run an open `workflow` on the task of a recorded episode, with the recorded answers of its model and tools."""
    task = recorded.task
    if task is None:
        raise ConfigError(f"episode {recorded.episode_id}: the record has no task, so the workflow cannot run on it")
    record = ReplayBackend(recorded)
    with using_tape(tape):
        trajectory = await run_client_episode(workflow, task, Client(record), timeout_s=timeout_s)
    return ReplayedEpisode(trajectory=trajectory, diverged=(*record.diverged, *tape.diverged))


async def compare_with_cassette(workflow: RolloutWorkflow, cassette: Cassette, *, live_tools: bool = False) -> list[str]:
    """Replay a cassette with an open `workflow`; return how the episode differs, [] where it is equal byte by byte."""
    recorded = _recorded_episode(cassette)
    tape = Player(cassette.answers, live=frozenset({"tool", "process"}) if live_tools else frozenset())
    replayed = await replay_trajectory(workflow, recorded, tape, timeout_s=RolloutConfig().episode_timeout_s)
    if replayed.diverged:
        return list(replayed.diverged)
    failure = replayed.trajectory.failure
    if failure is not None:
        return [f"the episode failed: {failure.kind}: {failure.message}"]
    record = timeless_record(replayed.trajectory)
    if record == bytes(cassette.episode):
        return _unused_answers(tape.unused())
    return [
        *_field_differences(orjson.loads(bytes(cassette.episode)), orjson.loads(record), ""),
        *_unused_answers(tape.unused()),
    ]


def _recorded_episode(cassette: Cassette) -> Trajectory:
    try:
        recorded = stored_trajectory(bytes(cassette.episode))
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise ConfigError(f"the episode of this cassette cannot be read: {error}; record it again") from error
    for index, turn in enumerate(recorded.turns):
        if turn.parent is not None and not 0 <= turn.parent < index:
            raise ConfigError(
                f"the episode of this cassette cannot be read: turn {index} continues turn {turn.parent}, which is no "
                "earlier one; record it again"
            )
    return recorded


def timeless_record(trajectory: Trajectory) -> bytes:
    """Return an episode as a cassette holds it: the line of a run's file without times."""
    plain = replace(
        trajectory,
        started_s=None,
        ended_s=None,
        turns=tuple(replace(turn, started_s=None, ended_s=None) for turn in trajectory.turns),
    )
    ended = EndedEpisode(plain, purpose="evaluation", group=None, step=0, policy_version=0, run_begin_s=0.0)
    return encode_line(trajectory_record(ended)).rstrip(b"\n")


def _unused_answers(answers: Sequence[TapedAnswer]) -> list[str]:
    return [f"the episode did not ask {answer.kind} {answer.name}, which answered in the record" for answer in answers]


def _field_differences(recorded: object, replayed: object, where: str) -> list[str]:
    """Return the fields of two records that differ."""
    if isinstance(recorded, dict) and isinstance(replayed, dict):
        one, other = cast("dict[str, object]", recorded), cast("dict[str, object]", replayed)
        names = [*one, *(name for name in other if name not in one)]
        return [
            line
            for name in names
            for line in _field_differences(one.get(name), other.get(name), f"{where}.{name}" if where else name)
        ]
    if isinstance(recorded, list) and isinstance(replayed, list):
        left, right = cast("list[object]", recorded), cast("list[object]", replayed)
        if len(left) == len(right):
            pairs = enumerate(zip(left, right, strict=True))
            return [line for at, pair in pairs for line in _field_differences(*pair, f"{where}[{at}]")]
    return [] if recorded == replayed else [f"{where}: expected {recorded!r:.200}, got {replayed!r:.200}"]
