"""The worker's loop over its two streams."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import InvariantError, TrainError
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.process import answer_requests
from agentrl.trainer.worker.protocol import (
    HEADER_BYTES,
    HEARTBEAT,
    BeginSending,
    Failed,
    FinishSending,
    Ready,
    Restore,
    Save,
    SendingBegun,
    SendingFinished,
    Setup,
    Stepped,
    WorkerReply,
    WorkerRequest,
    body_length,
    decode_reply,
    encode_frame,
    pack_batch,
)
from tests.trainer.helpers import random_batch


def _setup(path: Path) -> Setup:
    config, algorithm = TrainerConfig().model_dump_json(), AlgorithmConfig().model_dump_json()
    return Setup(model_path=str(path), trainer=config, algorithm=algorithm, sync="{}", total_steps=1, seed=0)


def _serve(frames: bytes) -> list[WorkerReply]:
    output = io.BytesIO()
    answer_requests(io.BytesIO(frames), output)
    data, replies = output.getvalue(), list[WorkerReply]()
    while data:
        end = HEADER_BYTES + body_length(data[:HEADER_BYTES])
        replies.append(decode_reply(data[HEADER_BYTES:end]))
        data = data[end:]
    return replies


def test_it_ends_when_its_input_closes() -> None:
    assert _serve(b"") == []


def test_the_first_request_must_set_it_up() -> None:
    [reply] = _serve(encode_frame(Save("x")))

    assert reply == Failed("InvariantError", "the first request to a trainer worker must be Setup, not Save")


def test_it_gives_signs_of_life_until_it_replies(checkpoint: Path) -> None:
    output = io.BytesIO()
    answer_requests(io.BytesIO(encode_frame(_setup(checkpoint))), output, beat_s=0.001)
    data = output.getvalue()
    beats = 0
    while data.startswith(HEARTBEAT):
        data, beats = data[HEADER_BYTES:], beats + 1
    assert beats > 0
    assert isinstance(decode_reply(data[HEADER_BYTES:]), Ready)


def test_a_second_set_up_is_refused(checkpoint: Path) -> None:
    ready, refused = _serve(encode_frame(_setup(checkpoint)) * 2)

    assert isinstance(ready, Ready)
    assert refused == Failed("InvariantError", "the trainer worker was set up twice")


def test_weights_do_not_change_while_they_are_sent_and_are_given_again_only_unchanged(checkpoint: Path) -> None:
    again = BeginSending(1, (), "float32", again=True)
    first = BeginSending(1, (), "float32", again=False)
    step, finish = pack_batch(random_batch()), FinishSending(())
    requests: list[WorkerRequest] = [
        _setup(checkpoint), again, first, step, Restore("x"), finish, again, finish, step, again, first, finish, again,
        finish,
    ]  # fmt: skip

    replies = _serve(b"".join(encode_frame(request) for request in requests))

    kinds = [type(reply) for reply in replies]
    assert kinds == [
        Ready, Failed, SendingBegun, Failed, Failed, SendingFinished, SendingBegun, SendingFinished, Stepped, Failed,
        SendingBegun, SendingFinished, SendingBegun, SendingFinished,
    ]  # fmt: skip
    refused = [reply for reply in replies if isinstance(reply, Failed)]
    assert [reply.kind for reply in refused] == ["UpdatePending", "InvariantError", "InvariantError", "UpdatePending"]
    assert refused[1].message == "TrainStep while weights are being sent; finish the sending first"
    assert refused[3].message == "the trainer's weights are past version 1; the server gets weights with the next update"


@pytest.mark.parametrize("keep", [3, HEADER_BYTES, 12])
def test_input_that_ends_inside_a_frame_ends_it_with_an_error(keep: int) -> None:
    with pytest.raises(TrainError, match="in the middle of a frame"):
        _serve(encode_frame(Save("x" * 20))[:keep])


def test_input_that_is_not_a_frame_ends_it_with_an_error() -> None:
    with pytest.raises(InvariantError, match="a frame header announces"):
        _serve(b"GET / HTTP/1.1\r\n\r\n")


def test_prints_of_python_and_of_native_code_do_not_touch_the_replies() -> None:
    program = (
        "import os; from agentrl.trainer.worker import process; process.main(); print('noise'); os.write(1, b'native noise')"
    )

    result = subprocess.run([sys.executable, "-c", program], input=encode_frame(Save("x")), capture_output=True, check=True)

    assert body_length(result.stdout[:HEADER_BYTES]) == len(result.stdout) - HEADER_BYTES
    assert isinstance(decode_reply(result.stdout[HEADER_BYTES:]), Failed)
    assert b"native noise" in result.stderr
