"""The files of a run and the links between processes hold the episodes that the release before held, and read its own."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentrl.episode.codec import (
    encode_line,
    pack_score,
    pack_trajectory,
    stored_trajectory,
    trajectory_record,
    unpack_trajectory,
)
from agentrl.episode.summary import EndedEpisode, summarize, trained_record
from agentrl.types import EpisodeFailure, ForkReason, StopReason, Task, Trajectory, Turn, VersionSpan

GOLDEN = Path(__file__).parent / "golden"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def turns() -> tuple[Turn, ...]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    return (
        Turn(
            context_ids=np.array([5, 6, 151643], np.int32),
            output_ids=np.array([7, 8, 9], np.int32),
            output_logprobs=np.array([-0.1, -2.25, -1e-7], np.float32),
            spans=(VersionSpan(start=0, end=1, version=3), VersionSpan(start=1, end=3, version=4)),
            stop_reason=StopReason.STOP,
            reward=0.5,
            role="solver",
            branch=(0, 2),
            sent_after=0,
            sent_at=0,
            rewarded_at=1,
            message={"role": "assistant", "content": None, "tool_calls": [call]},
            prompt_digest=bytes(range(16)),
            messages=({"role": "user", "content": "2 + 2 = ? \u00e9"}, {"role": "user", "content": "half \ud83d"}),
            tools=(ADD,),
            started_s=101.00004,
            ended_s=102.5,
        ),
        Turn(
            context_ids=np.array([], np.int32),
            output_ids=np.array([10], np.int32),
            output_logprobs=np.array([-3.0000001e-20], np.float32),
            spans=(VersionSpan(start=0, end=1, version=4),),
            stop_reason=StopReason.LENGTH,
            player="white",
            sent_after=1,
            sent_at=2,
            parent=0,
            message={"role": "assistant", "content": "4"},
            temperature=0.7,
            fork=ForkReason.HISTORY_EDITED,
            kept_thinking=True,
            messages=({"role": "tool", "content": [{"type": "text", "text": "4"}], "seen": {"big": 2**70, "odd": {3}}},),
        ),
    )


def trajectories() -> list[Trajectory]:
    whole = Trajectory(
        episode_id="12.0.1",
        task_id="t/7",
        turns=turns(),
        stop_reason=StopReason.COMPLETED,
        final_reward=1.0,
        advantage=-0.25,
        metrics={"busy": 1.0, "lost": float("nan")},
        reward_parts={"right": 1.0, "format": 0.5},
        turn_reward_parts={"format": 0.5},
        answer="42",
        task=Task(id="t/7", data={"question": "2 + 2 = ?", "n": [1, 2.5, None]}),
        started_s=100.0,
        ended_s=103.25,
    )
    failure = EpisodeFailure(kind="WorkflowError", message="no JSON", traceback="T", after_turn="agent.py:12")
    failed = Trajectory(episode_id="eval.3.0", task_id="t", turns=(), stop_reason=StopReason.WORKFLOW_ERROR, failure=failure)
    return [whole, failed]


def ended(trajectory: Trajectory) -> EndedEpisode:
    group = None if trajectory.episode_id.startswith("eval") else 12
    purpose = "evaluation" if group is None else "training"
    return EndedEpisode(trajectory, purpose=purpose, group=group, step=4, policy_version=5, run_begin_s=100.0)


SINCE = (b'"dialect":"","client":"","left_out":false,', b',"cached_tokens":null')
"""The fields of a turn that the release before did not have."""


def golden(name: str, made: bytes) -> bytes:
    """Return the bytes that the release before made."""
    path = GOLDEN / name
    assert path.exists(), f"{path}: no golden for {len(made)} bytes"
    return path.read_bytes()


def lines() -> bytes:
    records = [encode_line(trajectory_record(ended(each))) for each in trajectories()]
    summaries = [summarize(ended(each), file="step-000004", line=at) for at, each in enumerate(trajectories(), 1)]
    trained = trained_record(
        trajectories()[0],
        step=4,
        policy_version=5,
        advantages=[0.5, None],
        proximal_logprobs=[np.array([-1, np.nan, -0.1], np.float32), None],
    )
    return b"".join([*records, *(encode_line(msgspec.structs.asdict(each)) for each in summaries), encode_line(trained)])


def packed() -> bytes:
    return msgspec.msgpack.encode([*map(pack_trajectory, trajectories()), *map(pack_score, trajectories())])


def as_maps(data: bytes) -> Any:  # noqa: ANN401 - any message
    """Return what a message says: the order of fields says nothing, and a failure has names since this release."""
    found = json.loads(json.dumps(msgspec.msgpack.decode(data), default=bytes.hex, sort_keys=True))
    for each in found:
        if isinstance(each["failure"], list):
            each["failure"] = dict(zip(("kind", "message", "traceback", "after_turn"), each["failure"], strict=True))
        for turn in each.get("turns", ()):
            turn |= {"dialect": "", "client": "", "left_out": False, "cached_tokens": None}  # of this release
    return found


def differences(one: Trajectory, other: Trajectory) -> list[str]:
    """Return the fields in which two trajectories differ, bit for bit."""
    found = [each.name for each in fields(Trajectory) if each.name != "turns"]
    found = [name for name in found if repr(getattr(one, name)) != repr(getattr(other, name))]
    for mine, theirs in zip(one.turns, other.turns, strict=True):
        for field in fields(Turn):
            pair = [getattr(each, field.name) for each in (mine, theirs)]
            if not np.array_equal(*pair) if isinstance(pair[0], np.ndarray) else pair[0] != pair[1]:
                found.append(field.name)
            elif isinstance(pair[0], np.ndarray) and pair[0].dtype != pair[1].dtype:
                found.append(f"{field.name}: {pair[1].dtype}")
    return found


def test_the_lines_of_a_run_are_byte_for_byte_those_of_the_release_before() -> None:
    made = lines()
    for added in SINCE:
        assert made.count(added) == sum(len(each.turns) for each in trajectories())
    assert made.replace(SINCE[0], b"").replace(SINCE[1], b"") == golden("lines.jsonl", made)


def test_the_messages_between_processes_say_what_those_of_the_release_before_said() -> None:
    assert as_maps(packed()) == as_maps(golden("packed.msgpack", packed()))


def test_a_line_of_the_release_before_is_read() -> None:
    [whole, failed, *_] = golden("lines.jsonl", lines()).splitlines()
    assert stored_trajectory(failed).failure == trajectories()[1].failure
    lost = ["turn_reward_parts", "started_s", "ended_s"]  # not recorded, or on the run's clock
    of_turns = ["prompt_digest", "messages", "tools", "started_s", "ended_s"]
    assert [name for name in differences(trajectories()[0], stored_trajectory(whole)) if name not in lost + of_turns] == []
    assert [turn.started_s for turn in stored_trajectory(whole).turns] == [1.0, None]


def test_a_trajectory_crosses_a_link_unchanged_but_for_what_json_does_not_have() -> None:
    task = trajectories()[0].task
    assert task is not None
    arrived = unpack_trajectory(pack_trajectory(trajectories()[0]), task)
    assert differences(trajectories()[0], arrived) == ["messages", "tools", "messages"]
    assert arrived.turns[0].tools == [ADD]
    assert arrived.turns[0].messages[1]["content"] == "half \\ud83d"
    assert arrived.turns[1].messages[0]["seen"] == {"big": str(2**70), "odd": "{3}"}
