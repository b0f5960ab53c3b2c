"""The worker's loop over its two streams."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import InvariantError
from agentrl.processes.frames import BEAT_S, EMPTY_FRAME, PREFIX_BYTES, FrameBuffer, FrameWriter, framed, read_frames
from agentrl.processes.machine import free_memory
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.process import Inbox, answer_requests
from agentrl.trainer.worker.protocol import (
    BeginSending,
    Failed,
    FinishSending,
    GroupsOpened,
    HoldWeights,
    OpenGroups,
    Ready,
    Restore,
    Save,
    SendingBegun,
    SendingFinished,
    Setup,
    Stepped,
    WeightsHeld,
    WorkerReply,
    WorkerRequest,
    decode_reply,
    encode,
    pack_batch,
)
from agentrl.weights.types import GroupRequest
from tests.trainer.helpers import random_batch

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def _setup(path: Path, **settings: object) -> Setup:
    config, algorithm = TrainerConfig.model_validate(settings).model_dump_json(), AlgorithmConfig().model_dump_json()
    return Setup(model_path=str(path), trainer=config, algorithm=algorithm, sync="{}", total_steps=1, seed=0)


def _work(
    requests: io.BufferedReader | io.BytesIO,
    replies: BinaryIO,
    *,
    beat_s: float = BEAT_S,
    free: Callable[[], int | None] = free_memory,
) -> None:
    writer = FrameWriter(replies, beat_s)
    try:
        answer_requests(Inbox(requests, ends="after the request"), writer, free=free)
    finally:
        writer.close()


def _frame(request: WorkerRequest) -> bytes:
    return framed(encode(request))


def _serve(frames: bytes) -> list[WorkerReply]:
    output = io.BytesIO()
    _work(io.BytesIO(frames), output)
    return _replies(output.getvalue())


def _replies(data: bytes) -> list[WorkerReply]:
    """Return the replies in a stream, without the heartbeats."""
    return [decode_reply(body)[1] for body in FrameBuffer().cut(data) if body]


@pytest.mark.starts
def test_it_ends_when_its_input_closes() -> None:
    assert _serve(b"") == []


def test_the_first_request_must_set_it_up() -> None:
    [reply] = _serve(_frame(Save("x")))

    assert reply == Failed("InvariantError", "the first request to a trainer worker must be Setup, not Save")


class _Beaten(io.BytesIO):
    """Replies, of which a heartbeat can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.beaten = threading.Event()

    def write(self, data: ReadableBuffer, /) -> int:
        if bytes(data) == EMPTY_FRAME:
            self.beaten.set()
        return super().write(data)

    def wait(self) -> None:
        self.beaten.clear()
        assert self.beaten.wait(300)


def test_it_gives_signs_of_life_until_it_replies(checkpoint: Path) -> None:
    output = _Beaten()
    frames = _frame(_setup(checkpoint)) + _frame(HoldWeights(1, "bfloat16", again=False))
    _work(io.BytesIO(frames), output, beat_s=0.001, free=output.wait)  # asked while the weights are held
    assert [type(reply) for reply in _replies(output.getvalue())] == [Ready, WeightsHeld]


def test_a_second_set_up_is_refused(checkpoint: Path) -> None:
    ready, refused = _serve(_frame(_setup(checkpoint)) * 2)

    assert isinstance(ready, Ready)
    assert refused == Failed("InvariantError", "the trainer worker was set up twice")


@contextmanager
def _asked(
    checkpoint: Path, *, free: Callable[[], int | None] = free_memory, **settings: object
) -> Generator[Callable[[WorkerRequest], WorkerReply]]:
    """Yield a function that returns the reply to a request, of a worker that has been set up."""
    from_driver, to_worker = os.pipe()
    from_worker, to_driver = os.pipe()
    with (
        os.fdopen(from_driver, "rb") as requests,
        os.fdopen(to_driver, "wb") as replies,
        os.fdopen(from_worker, "rb") as received,
    ):
        worker = threading.Thread(target=_work, args=(requests, replies), kwargs={"free": free})
        worker.start()
        frames = read_frames(received)

        def ask(request: WorkerRequest) -> WorkerReply:
            stream.write(_frame(request))
            stream.flush()
            return decode_reply(next(filter(None, frames)))[1]

        try:
            with os.fdopen(to_worker, "wb") as stream:
                assert isinstance(ask(_setup(checkpoint, **settings)), Ready)
                yield ask
        finally:
            worker.join(300)


def test_without_a_snapshot_weights_do_not_change_while_they_are_sent_and_are_held_again_only_unchanged(
    checkpoint: Path,
) -> None:
    again, first = HoldWeights(1, "float32", again=True), HoldWeights(1, "float32", again=False)
    begin, finish, step = BeginSending(1, ("g",)), FinishSending(("g",), ("g",)), pack_batch(random_batch())
    opening = OpenGroups((GroupRequest("g", ranks=1, nccl=False, flat=True),), ())
    requests: list[WorkerRequest] = [
        again, begin, opening, first, begin, step, Restore("x"), again, finish, again, step, again, begin, first,
    ]  # fmt: skip

    with _asked(checkpoint, snapshot="stream") as ask:
        replies = [ask(request) for request in requests]

    assert [type(reply) for reply in replies] == [
        Failed, Failed, GroupsOpened, WeightsHeld, SendingBegun, Failed, Failed, Failed, SendingFinished, WeightsHeld,
        Stepped, Failed, Failed, WeightsHeld,
    ]  # fmt: skip
    refused = [reply for reply in replies if isinstance(reply, Failed)]
    assert [reply.kind for reply in refused] == ["UpdatePending"] * 2 + ["InvariantError"] * 3 + ["UpdatePending"] * 2
    assert refused[2].message == "TrainStep while weights are being sent; finish the sending first"
    assert refused[5].message == "the trainer's weights are past version 1; the server gets weights with the next update"


def test_a_snapshot_is_sent_and_sent_again_after_steps_until_the_next_version_is_held(checkpoint: Path) -> None:
    opening = OpenGroups((GroupRequest("g", ranks=1, nccl=False, flat=True),), ())
    begin, finish, step = BeginSending(1, ("g",)), FinishSending(("g",), ("g",)), pack_batch(random_batch())

    with _asked(checkpoint) as ask:
        held = ask(HoldWeights(1, "bfloat16", again=False))
        assert isinstance(held, WeightsHeld)
        assert held.snapshot
        assert held.num_bytes == 2 * 30048
        assert held.free_bytes is not None
        assert isinstance(ask(opening), GroupsOpened)
        first = ask(begin)
        assert isinstance(ask(step), Stepped)
        assert isinstance(ask(finish), SendingFinished)
        assert isinstance(ask(opening), GroupsOpened)
        assert ask(begin) == first  # the digests are those of the weights before the step
        assert isinstance(ask(HoldWeights(2, "bfloat16", again=False)), WeightsHeld)
        assert isinstance(ask(finish), SendingFinished)
        assert isinstance(ask(opening), GroupsOpened)
        refused = ask(begin)
        second = ask(BeginSending(2, ("g",)))
    assert isinstance(first, SendingBegun)
    assert isinstance(second, SendingBegun)
    assert first.manifest.tensor_checksums != second.manifest.tensor_checksums
    message = "the trainer holds version 2 and not version 1; the server gets weights with the next update"
    assert refused == Failed("UpdatePending", message)


def test_auto_keeps_no_snapshot_where_two_would_take_most_of_the_free_memory(checkpoint: Path) -> None:
    num_bytes = 2 * 30048
    for free in (3 * num_bytes, 3 * num_bytes - 1, None):
        with _asked(checkpoint, free=lambda free=free: free) as ask:
            held = ask(HoldWeights(1, "bfloat16", again=False))
            assert isinstance(ask(pack_batch(random_batch())), Stepped)
            begun = ask(BeginSending(1, ()))
        fits = free is None or free >= 3 * num_bytes
        assert held == WeightsHeld(snapshot=fits, num_bytes=num_bytes, free_bytes=free)
        assert isinstance(begun, SendingBegun if fits else Failed)


@pytest.mark.parametrize("keep", [3, PREFIX_BYTES, 12])
def test_input_that_ends_inside_a_frame_ends_it_without_an_answer(keep: int) -> None:
    assert _serve(_frame(Save("x" * 20))[:keep]) == []


def test_input_that_is_not_a_frame_ends_it_with_an_error() -> None:
    with pytest.raises(InvariantError, match="a frame header announces"):
        _serve(b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.starts
def test_prints_of_python_and_of_native_code_do_not_touch_the_replies() -> None:
    program = (
        "import os; from agentrl.trainer.worker import process; process.main(); print('noise'); os.write(1, b'native noise')"
    )

    result = subprocess.run([sys.executable, "-c", program], input=_frame(Save("x")), capture_output=True, check=True)

    [reply] = _replies(result.stdout)
    assert isinstance(reply, Failed)
    assert b"native noise" in result.stderr
