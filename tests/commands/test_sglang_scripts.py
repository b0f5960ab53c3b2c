"""`make sglang` and `make sglang-install`: clear messages, nothing done twice, a broken installation started over."""

from __future__ import annotations

import fcntl
import json
import os
import re
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

ROOT = Path(__file__).parents[2]
PIP = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/installed"
case "$*" in *"$REFUSE"*) echo "no such package" >&2; exit 1;; esac
"""
PYTHON = """#!/bin/sh
case "$1" in
  --version) echo "Python 3.12.1";;
  -c) exit ${WRONG_VERSION:-0};;
  -m) mkdir -p "$3/bin"; cp "$(dirname "$0")/pip" "$3/bin/pip"
      printf '#!/bin/sh\\nexit ${BROKEN:-0}\\n' > "$3/bin/python"; chmod +x "$3"/bin/*;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the scripts, and a Python whose pip only writes down what it is told."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name, text in (("python", PYTHON), ("pip", PIP)):
        path = tmp_path / "tools" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def installing(clone: Path, **environment: str) -> subprocess.Popen[str]:
    given = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(clone / "tools" / "python"),
        "REFUSE": "nothing at all",
        **environment,
    }
    command = ["bash", str(clone / "scripts" / "sglang_install.sh")]
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def install(clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    with installing(clone, **environment) as process:
        stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def installed(clone: Path) -> list[str]:
    return (clone / ".sglang-venv" / "bin" / "installed").read_text().splitlines()


def test_an_installation_happens_once(clone: Path) -> None:
    first = install(clone)
    assert first.returncode == 0, first.stderr
    assert "Installing SGLang 0.5.23 for CPUs" in first.stdout
    [told] = installed(clone)
    assert "--no-deps -r scripts/sglang_requirements.txt" in told
    second = install(clone)
    assert (second.returncode, second.stdout) == (0, "")
    assert installed(clone) == [told]


def test_every_package_is_pinned_once() -> None:
    lines = (ROOT / "scripts" / "sglang_requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    names = [re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins]
    assert sorted(names) == sorted(set(names))
    assert {"sglang", "torch", "torchvision", "transformers", "triton"} <= set(names)


@pytest.mark.parametrize("name", ["sglang_requirements.txt", "sglang_install.sh"])
def test_other_pins_and_another_script_start_over_whatever_the_clock_says(clone: Path, name: str) -> None:
    assert install(clone).returncode == 0
    (clone / ".sglang-venv" / "earlier").touch()
    path = clone / "scripts" / name
    path.write_text(path.read_text() + "# another line\n")
    os.utime(path, (0, 0))
    assert install(clone).returncode == 0
    assert not (clone / ".sglang-venv" / "earlier").exists()
    assert install(clone).stdout == ""


def test_a_second_installation_says_that_it_waits_and_uses_what_the_first_has_made(clone: Path) -> None:
    assert install(clone).returncode == 0
    stamp = clone / ".sglang-venv" / ".ready"
    made = stamp.read_text()
    stamp.unlink()
    with (clone / "scripts" / "sglang_requirements.txt").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with installing(clone) as second:
            assert second.stderr is not None
            said = second.stderr.readline()
            stamp.write_text(made)
            fcntl.flock(lock, fcntl.LOCK_UN)
            stdout, stderr = second.communicate(timeout=60)
    assert f"Another installation into {clone}/.sglang-venv is under way; waiting up to 1800 s" in said
    assert (second.returncode, stdout, stderr) == (0, "", "")
    assert len(installed(clone)) == 1


def test_an_installation_that_was_broken_off_starts_over(clone: Path) -> None:
    failed = install(clone, REFUSE="sglang_requirements.txt")
    assert failed.returncode == 1
    assert "no such package" in failed.stderr
    assert (
        "scripts/sglang_requirements.txt into .sglang-venv failed; the lines above name the missing package" in failed.stderr
    )
    (clone / ".sglang-venv" / "half-a-package").touch()
    assert install(clone).returncode == 0
    assert not (clone / ".sglang-venv" / "half-a-package").exists()


def test_a_short_disk_is_one_message_before_anything_is_installed(clone: Path) -> None:
    tool = clone / "tools" / "df"
    tool.write_text('#!/bin/sh\necho header\necho "/dev/x 9000 8000 1234 90% /"\n')
    tool.chmod(0o755)
    failed = install(clone, PATH=f"{clone / 'tools'}:{os.environ['PATH']}")
    assert failed.returncode == 1
    assert "needs 5000 MB of disk, 1234 MB are free" in failed.stderr
    assert not (clone / ".sglang-venv").exists()


def test_another_python_and_an_sglang_that_does_not_start_say_so(clone: Path) -> None:
    wrong = install(clone, WRONG_VERSION="1")
    assert wrong.returncode == 1
    assert "tried on Python 3.11 only; got Python 3.12.1" in wrong.stderr
    broken = install(clone, BROKEN="1")
    assert broken.returncode == 1
    assert "is installed in .sglang-venv, but does not start" in broken.stderr
    assert not (clone / ".sglang-venv" / ".ready").exists()


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
