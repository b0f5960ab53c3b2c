"""A real SGLang as agentrl launches it: the config's limits hold, the key stays secret, nothing outlives its driver."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import aiohttp
import pytest

from agentrl.errors import RequestRejected, ServerUnavailable
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.types import StopReason
from tests.support.scripted import request

pytestmark = [pytest.mark.starts, pytest.mark.sglang, pytest.mark.slow]
ROOT = Path(__file__).parents[3]
CONTEXT = 64
CALLS = [
    ("GET", "/server_info"), ("GET", "/model_info"), ("GET", "/v1/loads"), ("POST", "/generate"), ("POST", "/abort_request"),
    ("POST", "/pause_generation"), ("POST", "/continue_generation"), ("POST", "/update_weights_from_disk"),
    ("POST", "/weights_checker"), ("POST", "/begin_weight_update"), ("POST", "/end_weight_update"),
    ("POST", "/init_weights_update_group"), ("POST", "/update_weights_from_distributed"),
    ("POST", "/destroy_weights_update_group"),
]  # fmt: skip
"""In an order that leaves a server as it was, by bodies that ask for nothing."""
DRIVER = """
import sys, anyio
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool

async def main(model, logs):
    config = InferenceConfig(backend="sglang", device="cpu", max_running_requests=4, max_context_tokens=64)
    async with launch_pool(config, model_path=model, vocab_size=9, log_dir=logs) as pool:
        print(pool.describe().servers[0].url, flush=True)
        await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def session(port: str) -> Iterator[int]:
    """Yield the processes of the server that was launched on `port`."""
    commands = {int(entry.name): entry / "cmdline" for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    leaders = {pid for pid, path in commands.items() if {b"--port", port.encode()} <= set(words(path))}
    for pid in commands:
        try:
            if os.getpgid(pid) in leaders:
                yield pid
        except ProcessLookupError:
            continue


def words(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:
        return []


async def refuses_those_without_the_key(url: str, vocab_size: int, *, key: str) -> None:
    """What the client relies on: whoever has no key is told so, by HTTP 401, and does nothing."""
    async with aiohttp.ClientSession() as http:
        for bearer in (None, "wrong", key):
            headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
            for method, path in CALLS:
                async with http.request(method, url + path, headers=headers, json={}) as response:
                    assert (response.status == 401) == (bearer != key), (bearer, path, response.status)
    with pytest.raises(RequestRejected, match=r"HTTP 401.*inference.api_key_env"):
        async with SGLangServer(url, vocab_size=vocab_size):
            pass


async def test_the_limits_are_the_config_s_the_key_is_secret_and_the_end_is_quick(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "s3cret-value")
    config = InferenceConfig(
        backend="sglang", device="cpu", max_running_requests=4, max_context_tokens=CONTEXT, api_key_env="THE_KEY", host="::1"
    )
    size = int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])
    async with launch_pool(config, model_path=checkpoint, vocab_size=size, log_dir=tmp_path) as pool:
        url = pool.describe().servers[0].url
        assert url.startswith("http://[::1]:")
        await refuses_those_without_the_key(url, size, key="s3cret-value")
        for prompt, room in ((CONTEXT - 1, 1), (CONTEXT // 2, CONTEXT // 2)):
            done = await pool.generate(request(*([7] * prompt), max_new_tokens=room))
            assert len(done.output_ids) == room or done.stop_reason is StopReason.STOP
        pids = list(session(url.rpartition(":")[2]))
        commands = [words(Path(f"/proc/{pid}/cmdline")) for pid in pids]
    assert len(pids) >= 4  # the launcher, its watchdog, scheduler and detokenizer
    assert not [word for command in commands for word in command if b"s3cret" in word]
    assert "s3cret" not in (tmp_path / "server-0.log").read_text()
    assert not list(session(url.rpartition(":")[2]))


def test_a_killed_driver_takes_the_real_server_with_it(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(checkpoint), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as driver, ExitStack() as handles:
        assert driver.stdout is not None
        port = driver.stdout.readline().strip().rpartition(":")[2]
        pids = list(session(port))
        assert len(pids) >= 4
        opened: list[int] = []
        for pid in pids:
            with suppress(ProcessLookupError):  # a helper of the server that has ended by now
                opened.append(os.pidfd_open(pid))
                handles.callback(os.close, opened[-1])
        driver.send_signal(signal.SIGKILL)
        for handle in opened:
            assert select.select([handle], [], [], 60)[0]


async def test_a_model_that_cannot_be_loaded_is_told_with_the_end_of_the_log(tmp_path: Path) -> None:
    config = InferenceConfig(backend="sglang", device="cpu")
    with pytest.raises(ServerUnavailable, match=r"(?s)server-0 .*ended with .*its log ends with.*nothing-here"):
        async with launch_pool(config, model_path=tmp_path / "nothing-here", vocab_size=9, log_dir=tmp_path):
            pass
