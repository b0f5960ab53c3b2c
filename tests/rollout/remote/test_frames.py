"""Frames between driver and workers, also hostile ones."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import ByteStream
from hypothesis import given
from hypothesis import strategies as st

from agentrl.episode.codec import pack_score, pack_trajectory, pack_turn, packed, unpack_trajectory, unpack_turn, with_score
from agentrl.errors import AgentRLError, ConfigError, InvariantError
from agentrl.inference.backend import Context, GenerateRequest, SamplingParams
from agentrl.processes.frames import FrameBuffer, framed
from agentrl.processes.link import Link
from agentrl.rollout.remote.calls import rollout_error
from agentrl.rollout.remote.frames import (
    MAX_MESSAGE_BYTES,
    CancelEpisode,
    GroupScored,
    ModelCall,
    ToDriver,
    WorkerReady,
    encode_message,
    pack_task,
    read_to_driver,
    read_to_worker,
    unpack_task,
)
from agentrl.rollout.remote.worker import RemoteWorker
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Turn
from tests.rollout.harness import PATIENCE_S, SAMPLING, Judge, episode, make_server, says
from tests.support.remote import worker_setup

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(cuts=st.lists(st.integers(0, 60), max_size=6), numbers=st.lists(st.integers(0, 2**40), max_size=5))
def test_frames_come_out_whole_however_the_stream_is_cut(cuts: list[int], numbers: list[int]) -> None:
    data = b"".join(framed(encode_message(CancelEpisode(number))) for number in numbers)
    buffer, found = FrameBuffer(), list[int]()
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(data)], strict=True):
        for body in buffer.cut(data[begin:end] if begin < end else b""):
            message = read_to_worker(body)
            assert isinstance(message, CancelEpisode)
            found.append(message.number)
    assert found == numbers


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_task_arrives_unchanged_or_is_refused(data: dict[str, object]) -> None:
    task = Task(id="t", data=data)
    try:
        packed = pack_task(task)
    except ConfigError:
        assert "\\ud" in repr(data)  # half of a surrogate pair is no text
        return
    assert repr(unpack_task("t", packed).data) == repr(data)


def test_a_frame_over_the_limit_is_refused_by_its_header() -> None:
    with pytest.raises(InvariantError, match="at most 268435456 are allowed"):
        FrameBuffer(MAX_MESSAGE_BYTES).cut((MAX_MESSAGE_BYTES + 1).to_bytes(8, "little"))


@pytest.mark.parametrize(
    "body", [b"", b"\xff\xff", msgspec.msgpack.encode({"type": "Eval", "code": "1"}), msgspec.msgpack.encode([1, 2])]
)
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(InvariantError, match="not a message to a rollout worker"):
        read_to_worker(body)
    with pytest.raises(InvariantError, match="not a message of a rollout worker"):
        read_to_driver(body)


@pytest.mark.parametrize("kind", ["SystemExit", "annotations", "flatten", "__builtins__"])
def test_an_error_that_agentrl_does_not_have_is_refused(kind: str) -> None:
    with pytest.raises(InvariantError, match="which agentrl does not have"):
        rollout_error(kind, "words")
    assert isinstance(rollout_error("ServerTimeout", "late"), AgentRLError)


async def test_a_score_leaves_the_parts_of_turn_rewards_alone_in_a_worker_too(renderer: Renderer) -> None:
    parts = {"right": 1.0, "format": 0.5}
    played = replace(await episode(Judge(), renderer), reward_parts=parts, turn_reward_parts={"format": 0.5})
    assert unpack_trajectory(pack_trajectory(played), Task(id="t", data={})).turn_reward_parts == {"format": 0.5}
    assert with_score(played, pack_score(replace(played, reward_parts={"format": 0.5}))).reward_parts == {"format": 0.5}


async def test_given_advantages_come_back_with_the_scores(renderer: Renderer) -> None:
    played = await episode(Judge(), renderer)
    scored = with_score(played, pack_score(replace(played, advantage=-0.25)))
    assert (scored.advantage, scored.final_reward, scored.turns) == (-0.25, played.final_reward, played.turns)


async def test_a_turn_whose_parts_contradict_each_other_is_refused(renderer: Renderer) -> None:
    [turn] = (await episode(Judge(), renderer)).turns
    sent = msgspec.msgpack.decode(pack_turn(turn))
    assert unpack_turn(pack_turn(turn), 2.0).ended_s == (turn.ended_s or math.nan) + 2.0
    wrong = [
        {"output_logprobs": sent["output_logprobs"][4:]},
        {"output_logprobs": sent["output_logprobs"][1:]},
        {"output_ids": sent["output_ids"][:-1]},
        {"spans": ((0, 1, 0),)},
        {"spans": ((1, 5, 0),)},
        {"conversation": b"[]"},
        {"conversation": 7},
        {"stop_reason": "tired"},
        {"temperature": "warm"},
    ]
    for fields in wrong:
        with pytest.raises(InvariantError, match="rollout"):
            unpack_turn(packed(sent | fields))


class ScriptedStream(ByteStream):
    """A worker that is ready and then sends what a test gives it."""

    def __init__(self, *messages: ToDriver | bytes) -> None:
        self._data = [
            each if isinstance(each, bytes) else framed(encode_message(each)) for each in (WorkerReady(0.0), *messages)
        ]

    async def send(self, item: bytes) -> None:
        pass

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._data:
            await anyio.sleep_forever()
        await anyio.wait_all_tasks_blocked()  # so that the episode has started
        return self._data.pop(0)


def call(**fields: object) -> ModelCall:
    context = Context.of([5, 6, 7])
    request = GenerateRequest(request_id="r", episode_id="e", context=context, sampling=SamplingParams(max_new_tokens=4))
    sampling = msgspec.json.encode({"max_new_tokens": request.sampling.max_new_tokens}).decode()
    made = ModelCall(call=0, request_id="r", episode_id="e", context=context, sampling=sampling, streamed=False)
    return msgspec.structs.replace(made, **fields)


HOSTILE: list[ToDriver | bytes] = [
    b"\xff" * 64,
    framed(encode_message(CancelEpisode(0))),
    WorkerReady(1.0),
    GroupScored(0, ()),
    call(context=Context((b"1234",), (b"1,2",), 2, 9)),
    call(sampling="{}"),
]


@pytest.mark.parametrize("message", HOSTILE, ids=[str(number) for number in range(len(HOSTILE))])
async def test_a_worker_that_breaks_the_protocol_ends_the_run(renderer: Renderer, message: ToDriver | bytes) -> None:
    link = Link(ScriptedStream(message), where="a script", pid=0)
    worker = RemoteWorker("rollout worker 0", link, make_server(renderer, says("good")))

    async def serve_with_an_episode() -> None:
        async with task_group() as tasks:
            play = partial(worker.play, task, episode_id="e", sampling=SAMPLING, on_turn=ignore)
            tasks.start_soon(play)
            await worker.serve()

    def ignore(turn: Turn) -> None:
        pass

    task = Task(id="t", data={})
    with anyio.fail_after(PATIENCE_S):
        await worker.set_up(worker_setup("Acts", Path("model")))
        with pytest.raises(InvariantError):
            await serve_with_an_episode()
