"""One suite: every test here runs against the embedded server and, marked `sglang`, against a real SGLang.

The tests of a module with `SCRIPTED = True` need no model, and run against the scripted engine too. The real server of a
module with `ADAPTERS = True` is one that takes LoRA adapters.

The real server starts once in a test session (36 to 90 s); `server` brings either back to a known state around each test.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from anyio import create_task_group
from anyio.abc import TaskGroup

from agentrl.config import parse_config
from tests.support.api import Api, api_of
from tests.support.embedded import ReferenceModel
from tests.support.servers import RunningServer, is_reset, reset, running_server, scripted_as_running, tiny_checkpoints


@pytest.fixture
def anyio_backend() -> str:
    """aiohttp needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Four tiny Qwen3 checkpoints with different weights and one tokenizer; do not write to them."""
    return tiny_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def reference(checkpoints: dict[int, Path]) -> ReferenceModel:
    """HF's own float32 forward pass with the base weights."""
    return ReferenceModel(checkpoints[0])


@pytest.fixture(scope="session")
def embedded_server(checkpoints: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    """An embedded server process, one for the whole test session."""
    with running_server("embedded", checkpoints, tmp_path_factory.mktemp("embedded")) as server:
        reset(server)
        yield server


@pytest.fixture(scope="session")
def sglang_server(checkpoints: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Generator[RunningServer]:
    """A real SGLang process, one for the whole test session."""
    with running_server("sglang", checkpoints, tmp_path_factory.mktemp("sglang")) as server:
        reset(server)
        yield server


@pytest.fixture(scope="session")
def sglang_adapters_server(
    checkpoints: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[RunningServer]:
    """A real SGLang process that takes LoRA adapters, with the flags of a run, one for the whole test session."""
    run = parse_config({
        "workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}, "inference": {"backend": "sglang"},
        "trainer": {"lora": {"rank": 4}}, "sync": {"adapter": "adapter"},
    })  # fmt: skip
    flags = run.resolved_inference.sglang_args
    with running_server("sglang", checkpoints, tmp_path_factory.mktemp("sglang"), extra=flags) as server:
        reset(server)
        yield server


@pytest.fixture(scope="session")
def scripted_server(checkpoints: dict[int, Path]) -> Generator[RunningServer]:
    """The scripted engine behind a socket, in a thread of this process, one for the whole test session."""
    with scripted_as_running(checkpoints) as server:
        reset(server)
        yield server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Choose the servers of each test."""
    if "server" in metafunc.fixturenames:
        real = "sglang_adapters" if getattr(metafunc.module, "ADAPTERS", False) else "sglang"
        kinds = ["embedded", pytest.param(real, marks=pytest.mark.sglang)]
        kinds += ["scripted"] if getattr(metafunc.module, "SCRIPTED", False) else []
        metafunc.parametrize("server", kinds, indirect=True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Generator[RunningServer]:
    """The server under test: running, idle, empty cache, base weights as version "0", before and after each test."""
    running: RunningServer = request.getfixturevalue(f"{request.param}_server")
    if not is_reset(running):  # somebody used it without this fixture
        reset(running)
    # A collection may stop this process for a second, while calls at the server run on to their end.
    gc.disable()
    try:
        yield running
    finally:
        gc.enable()
    reset(running)


@pytest.fixture
async def api(server: RunningServer) -> AsyncGenerator[Api]:
    """The endpoints of the server under test."""
    async with api_of(server) as endpoints:
        yield endpoints


@pytest.fixture
async def tasks() -> AsyncGenerator[TaskGroup]:
    """A task group for calls in flight; what still flies when the test ends is cancelled, which disconnects it."""
    async with create_task_group() as group:
        yield group
        group.cancel_scope.cancel()
