"""The worker's loop over its two streams."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import InvariantError, TrainError
from agentrl.train.config import TrainerConfig
from agentrl.train.protocol import HEADER_BYTES, Failed, Ready, Reply, Save, Setup, body_length, decode_reply, encode_frame
from agentrl.train.worker import serve


def _setup(path: Path) -> Setup:
    config, algorithm = TrainerConfig().model_dump_json(), AlgorithmConfig().model_dump_json()
    return Setup(model_path=str(path), trainer=config, algorithm=algorithm, total_steps=1, seed=0)


def _serve(frames: bytes) -> list[Reply]:
    output = io.BytesIO()
    serve(io.BytesIO(frames), output)
    data, replies = output.getvalue(), list[Reply]()
    while data:
        end = HEADER_BYTES + body_length(data[:HEADER_BYTES])
        replies.append(decode_reply(data[HEADER_BYTES:end]))
        data = data[end:]
    return replies


def test_it_ends_when_its_input_closes() -> None:
    assert _serve(b"") == []


def test_the_first_request_must_set_it_up() -> None:
    [reply] = _serve(encode_frame(Save("x")))

    assert reply == Failed("InvariantError", "the first request to a trainer worker must be Setup, got Save")


def test_a_second_set_up_is_refused(checkpoint: Path) -> None:
    ready, refused = _serve(encode_frame(_setup(checkpoint)) * 2)

    assert isinstance(ready, Ready)
    assert refused == Failed("InvariantError", "the trainer worker was set up twice")


@pytest.mark.parametrize("keep", [3, HEADER_BYTES, 12])
def test_input_that_ends_inside_a_frame_ends_it_with_an_error(keep: int) -> None:
    with pytest.raises(TrainError, match="in the middle of a frame"):
        _serve(encode_frame(Save("x" * 20))[:keep])


def test_input_that_is_not_a_frame_ends_it_with_an_error() -> None:
    with pytest.raises(InvariantError, match="a frame of"):
        _serve(b"GET / HTTP/1.1\r\n\r\n")


def test_prints_of_python_and_of_native_code_do_not_touch_the_replies() -> None:
    program = "import os; from agentrl.train import worker; worker.main(); print('noise'); os.write(1, b'native noise')"

    result = subprocess.run([sys.executable, "-c", program], input=encode_frame(Save("x")), capture_output=True, check=True)

    assert body_length(result.stdout[:HEADER_BYTES]) == len(result.stdout) - HEADER_BYTES
    assert isinstance(decode_reply(result.stdout[HEADER_BYTES:]), Failed)
    assert b"native noise" in result.stderr
