"""`make sglang`: clear messages, and nothing done twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support.ports import later_port

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the scripts."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


class Answers(BaseHTTPRequestHandler):
    """What a server says to GET /model_info."""

    body: bytes = b"hello"
    status: int = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class SGLang(Answers):
    body = json.dumps({"model_path": "/models/some"}).encode()


class Locked(Answers):
    status = 401


@contextmanager
def serving(kind: type[Answers]) -> Generator[int]:
    with HTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(params=[SGLang, Answers])
def running(request: pytest.FixtureRequest) -> Generator[tuple[type[Answers], int]]:
    with serving(request.param) as port:
        yield request.param, port


def serve(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(clone / "scripts" / "sglang_serve.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_API_KEY"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_server_that_already_answers_is_left_alone_and_another_program_is_named(
    clone: Path, running: tuple[type[Answers], int]
) -> None:
    kind, port = running
    ended = serve(clone, "--port", str(port))
    if kind is SGLang:
        assert ended.returncode == 0
        assert (
            ended.stdout == f"A server already answers at http://127.0.0.1:{port} and serves /models/some; nothing to do.\n"
        )
    else:
        assert ended.returncode == 1
        assert f"http://127.0.0.1:{port}: in use" in ended.stderr
        assert "PORT=30001" in ended.stderr
    assert not (clone / ".sglang-venv").exists()


def test_a_server_of_another_model_is_an_error_that_names_both(clone: Path, tmp_path: Path) -> None:
    with serving(SGLang) as port:
        ended = serve(clone, "--port", str(port), "--model", "runs/mine")
        url = f"http://127.0.0.1:{port}"
        assert ended.returncode == 1
        assert f"already answers at {url} and serves /models/some, not MODEL=runs/mine: end it" in ended.stderr
        assert "PORT=30001 MODEL=runs/mine" in ended.stderr
        (tmp_path / "link").symlink_to("/models/some")
        for same in ("/models/some/", str(tmp_path / "link")):
            ended = serve(clone, "--port", str(port), "--model", same)
            assert (ended.returncode, ended.stdout.endswith("serves /models/some; nothing to do.\n")) == (0, True)
    with serving(Locked) as port:
        ended = serve(clone, "--port", str(port), "--model", "runs/mine")
        assert ended.returncode == 1
        assert "does not say without its key whether it serves MODEL=runs/mine: export SGLANG_API_KEY" in ended.stderr
        ended = serve(clone, "--port", str(port))
        assert (ended.returncode, "serves a model, to those who have its key" in ended.stdout) == (0, True)
    assert not (clone / ".sglang-venv").exists()


def test_bad_wishes_are_one_message_before_anything_is_installed(clone: Path) -> None:
    port = str(later_port())
    for arguments, expected in (
        (["--model", "/nowhere"], "MODEL=/nowhere: expected a local HF checkpoint"),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines: export SGLANG_API_KEY"),
        (["--host", "192.0.2.1"], "http://192.0.2.1:"),
    ):
        ended = serve(clone, "--port", port, *arguments)
        assert ended.returncode == 1
        assert expected in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (clone / ".sglang-venv").exists()
