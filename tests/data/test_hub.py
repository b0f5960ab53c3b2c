"""Names of the hub lead into the local cache, and nothing but `agentrl download` opens a connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl.config.names import HubName, parse_hub_name
from agentrl.errors import ConfigError
from tests.support.cli import AGENTRL

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NO_SOCKETS = """
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise SystemExit(f"opened a connection: {arguments}")
sys.addaudithook(refuse)
"""


def cache_repository(cache: Path, folder: str, files: dict[str, str], ref: str = "main") -> Path:
    """Write a repository into a cache of the hub, in its layout."""
    root = cache / folder
    (root / "refs").mkdir(parents=True)
    (root / "refs" / ref).write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    for name, text in files.items():
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).write_text(text)
    return snapshot


def python(code: str, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, because the hub's library reads its variables when it is imported."""
    env = {**os.environ, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", **variables}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("hf://Qwen/Qwen3-0.6B", "model", HubName("model", "Qwen/Qwen3-0.6B", None, None)),
        ("hf://Qwen/Qwen3-0.6B@v1", "model", HubName("model", "Qwen/Qwen3-0.6B", "v1", None)),
        ("hf://a/b/c/d.parquet", "dataset", HubName("dataset", "a/b", None, "c/d.parquet")),
        ("hf://datasets/a/b@r/c.csv", "model", HubName("dataset", "a/b", "r", "c.csv")),
    ],
)
def test_a_name_says_repository_revision_and_file(text: str, kind: str, expected: HubName) -> None:
    found = parse_hub_name(text, "dataset" if kind == "dataset" else "model")
    assert found == expected
    assert parse_hub_name(str(found)) == expected


@pytest.mark.parametrize("text", ["hf://", "hf://name", "hf://a/b@", "hf://a/b/../../etc", "hf:/a/b", "hf://a b/c"])
def test_a_name_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected hf://org/name"):
        parse_hub_name(text)


@pytest.mark.starts
def test_names_are_found_in_the_cache_without_a_connection(tmp_path: Path) -> None:
    model = cache_repository(tmp_path, "models--org--tiny", {"config.json": "{}"})
    files = {f"main/train-{number}.jsonl": f'{{"q": {number}}}\n' for number in (1, 2)}
    data = cache_repository(tmp_path, "datasets--org--sums", files)
    code = f"""{NO_SOCKETS}
from agentrl.config import ModelConfig
from agentrl.data.config import TasksConfig
from agentrl.data.load import load_training
from agentrl.config.names import local_dataset
print(ModelConfig(path="hf://org/tiny").directory)
print(ModelConfig(path="hf://org/tiny@{COMMIT}").directory)
print(local_dataset("hf://org/sums/main"))
print([task["q"] for task in load_training(TasksConfig(path="hf://org/sums/main/train-*.jsonl")).finite])
"""
    result = python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(model), str(model), str(data / "main"), "[1, 2]"]


LACKING = {
    "model('hf://org/none')": "model.path: hf://org/none is not in the local cache of the hub, and a run downloads nothing",
    "model('hf://org/none@v1')": "run `agentrl download hf://org/none@v1` first",
    "local_dataset('hf://org/sums@v2/a.csv')": "run `agentrl download hf://datasets/org/sums@v2/a.csv` first",
    "local_dataset('hf://org/sums/b.csv')": "run `agentrl download hf://datasets/org/sums/b.csv` first",
    "local_dataset('hf://org/sums')": "name a file or a folder of this data set; in the local cache it has ['a.csv']",
}
"""Calls, and what their errors say."""


@pytest.mark.starts
def test_what_the_cache_lacks_is_an_error_with_the_command_and_no_connection(tmp_path: Path) -> None:
    cache_repository(tmp_path, "datasets--org--sums", {"a.csv": "q\n1\n"})
    code = f"""{NO_SOCKETS}
from agentrl.config import ModelConfig
from agentrl.errors import ConfigError
from agentrl.config.names import local_dataset
def model(path):
    return ModelConfig(path=path).directory
for call in ({", ".join(f"lambda: {call}" for call in LACKING)}):
    try:
        print("found", call())
    except ConfigError as error:
        print(error)
"""
    result = python(code, tmp_path)
    assert result.returncode == 0, result.stderr
    for line, expected in zip(result.stdout.splitlines(), LACKING.values(), strict=True):
        assert expected in line


class HubHandler(BaseHTTPRequestHandler):
    """Answers what the hub's library asks to download one small data set."""

    FILE = b'{"q": 1}\n'

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/org/sums/tree/"):
            listed = [{"type": "file", "path": "train.jsonl", "size": len(self.FILE), "oid": "1" * 40}]
            self.send(200, json.dumps(listed).encode(), body)
        elif path.startswith("/api/datasets/org/sums"):
            info = {"id": "org/sums", "sha": COMMIT, "siblings": [{"rfilename": "train.jsonl"}], "tags": []}
            self.send(200, json.dumps(info).encode(), body)
        elif path.endswith("/train.jsonl"):
            self.send(200, self.FILE, body)
        else:
            self.send(404, b"{}", body)

    def send(self, status: int, data: bytes, body: bool) -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(data)), "X-Repo-Commit": COMMIT, "ETag": '"' + "1" * 40 + '"'}
        for name, value in {**headers, "Content-Type": "application/json"}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub() -> Generator[str]:
    """The address of a hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.starts
def test_the_download_command_fetches_what_a_run_then_finds(tmp_path: Path, hub: str) -> None:
    env = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub}
    env |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [str(AGENTRL), "download", "hf://datasets/org/sums/train.jsonl"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    place = Path(result.stdout.strip())
    assert place.read_bytes() == HubHandler.FILE
    code = f"{NO_SOCKETS}\nfrom agentrl.config.names import local_dataset\nprint(local_dataset('hf://org/sums/train.jsonl'))"
    found = python(code, tmp_path / "cache")
    assert found.stdout.strip() == str(place), found.stderr
    env["HF_HUB_OFFLINE"] = "1"
    command = [str(AGENTRL), "download", "hf://org/none"]
    refused = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode == 2
    assert "HF_HUB_OFFLINE is set: unset it to download" in refused.stderr
