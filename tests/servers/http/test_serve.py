"""The server as a process: its ready line, its ends, its refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.servers.listening import check_address


@contextmanager
def process(*arguments: str) -> Generator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "agentrl.servers.serve", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


def ready(child: subprocess.Popen[bytes]) -> str:
    assert child.stdout is not None
    line = json.loads(child.stdout.readline())
    assert line["event"] == "ready"
    with urllib.request.urlopen(line["url"] + "/model_info", timeout=60) as response:
        assert json.loads(response.read())["weight_version"] == "3"
    return line["url"]


def until_it_samples(url: str) -> None:
    """Wait until the server samples; it would reset a connection from which it has not read the request."""
    running = 0
    while not running:
        with urllib.request.urlopen(url + "/v1/loads", timeout=60) as response:
            running = json.loads(response.read())["loads"][0]["num_running_reqs"]


@pytest.fixture
def patient(checkpoint: Path, tmp_path: Path) -> Path:
    """The checkpoint with so many positions that a completion of 200,000 tokens, which takes minutes, fits."""
    folder = tmp_path / "patient"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 300_000}))
    return folder


@pytest.mark.starts
@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "stdin"])
def test_a_server_process_announces_itself_and_ends_cleanly(end: str, patient: Path) -> None:
    options = ["--max-context-tokens", "250000", "--weight-version", "3", "--exit-with-stdin"]
    with process("--model-path", str(patient), *options) as child:
        url = ready(child)
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60) as connection:
            body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 200_000, "ignore_eos": True}})
            head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            until_it_samples(url)
            if end == "stdin":
                assert child.stdin is not None
                child.stdin.close()
            else:
                child.send_signal(signal.Signals[end])
            assert child.wait(300) == 0
            with connection.makefile("rb") as answer:
                assert b'"length"' not in answer.read()
        assert child.stderr is not None
        assert child.stderr.read() == b""


@pytest.mark.starts
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-path", "/nonexistent"], "cannot read /nonexistent/config.json"),
        (["--model-path", "x", "--host", "0.0.0.0"], "set an API key, or listen on 127.0.0.1"),
        (["--model-path", "x", "--api-key-env", "AGENTRL_NO_SUCH_KEY"], "AGENTRL_NO_SUCH_KEY is not set"),
        (["--model-path", "x", "--fault", "bad-luck"], "--fault bad-luck: expected one of abort-deadlock"),
    ],
)
def test_a_server_that_cannot_start_says_why(arguments: list[str], message: str) -> None:
    with process(*arguments) as child:
        _, stderr = child.communicate(timeout=60)
        assert child.returncode == 2
        assert message in stderr.decode()
        assert b"Traceback" not in stderr


def test_only_loopback_is_allowed_without_a_key() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_address(host, None)
    check_address("0.0.0.0", "key")
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="can be reached from other machines"):
            check_address(host, None)
    with pytest.raises(ConfigError, match="key is empty"):
        check_address("127.0.0.1", "")
