"""Records of episodes with whatever messages and trees an episode may have, for property tests."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from agentrl.episode.codec import encode_line, trajectory_record
from agentrl.episode.summary import EndedEpisode
from agentrl.types import ForkReason, StopReason, Task, Trajectory, Turn, VersionSpan

Wire = dict[str, Any]
TEXTS = st.sampled_from(["", "a", "é\n", "<x>", "0.5"]) | st.text(max_size=5)
IDENTITIES = st.sampled_from(["c1", "c2", ""]) | TEXTS
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
WRITTEN = [
    "{}",
    '{"a":1}',
    '{"a": 1, "a": 2}',
    '{"a": NaN}',
    '["x"]',
    '"\\ud83d"',
    '{"é": "\\u00e9"}',
    '{"a": 99999999999999999999}',
]
ARGUMENTS = TEXTS | st.sampled_from(WRITTEN)
CALLS = st.fixed_dictionaries(
    {"id": IDENTITIES, "type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS}), "index": st.integers(0, 3)},
)
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}) | st.sampled_from(
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://host/cat.JPG?x=1", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://host/cat"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ]
)
CONTENTS = st.none() | TEXTS | st.lists(PARTS, max_size=3)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "tool", "function", "critic"])},
    optional={"content": CONTENTS, "name": TEXTS, "tool_call_id": IDENTITIES, "tool_calls": st.lists(CALLS, max_size=2)},
)
ANSWERS = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": CONTENTS},
    optional={"tool_calls": st.lists(CALLS, max_size=2), "reasoning_content": TEXTS, "refusal": st.none(), "extra": VALUES},
)
TOOLS = st.none() | st.lists(st.just({"type": "function", "function": {"name": "add", "parameters": {}}}), max_size=2)


def record_of(trajectory: Trajectory) -> Wire:
    """Return the JSON of the line that a run keeps of an episode."""
    ended = EndedEpisode(trajectory, purpose="training", group=3, step=1, policy_version=2, run_begin_s=0.0)
    return msgspec.json.decode(encode_line(trajectory_record(ended)))


@st.composite
def turns(draw: st.DrawFn, at: int) -> Turn:
    parent = draw(st.none() | st.integers(0, at - 1)) if at else None
    count = draw(st.integers(0, 3))
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=count, max_size=count))
    return Turn(
        parent=parent,
        fork=draw(st.none() | st.sampled_from(ForkReason)),
        messages=tuple(draw(st.lists(MESSAGES, max_size=4))),
        message=draw(ANSWERS | st.just({})),
        tools=draw(TOOLS),
        context_ids=np.array(draw(st.lists(st.integers(0, 9), max_size=3)), np.int32),
        output_ids=np.array(draw(ids), np.int32),
        output_logprobs=np.array(logprobs, np.float32),
        spans=(VersionSpan(0, count, 7),) if count else (),
        stop_reason=StopReason.STOP,
        sent_after=at,
        sent_at=at,
        cached_tokens=draw(st.none() | st.integers(0, 5)),
    )


@st.composite
def records(draw: st.DrawFn) -> Wire:
    """Return the record of an episode of up to five turns in any tree."""
    found = tuple(draw(turns(at)) for at in range(draw(st.integers(0, 5))))
    data = draw(st.dictionaries(TEXTS, VALUES, max_size=2))
    trajectory = Trajectory(
        episode_id="3.0.0",
        task_id="t",
        task=Task(id="t", data=data),
        turns=found,
        stop_reason=StopReason.COMPLETED,
        final_reward=1.0,
        metrics={"busy": 1.0, "lost": float("nan")},
    )
    return record_of(trajectory)
