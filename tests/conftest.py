"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.forked_starts import fork_from_now_on, true_starts
from tests.support.tiny import tiny_checkpoint

pytest_plugins = ["tests.support.process_guard"]
MANY_TESTS = 20
platform.processor()  # asks `uname` once in a process; the openai client does so at its first request

# Two cores are shared by pytest and the servers it starts: one thread each is fastest, and hub access is never wanted.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# A shell starts what it runs in the background with SIGINT ignored, and so would be every process that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Under `nohup` they would ignore SIGHUP. A handler that does nothing keeps the suite alive, and no process inherits it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda _number, _frame: None)

# The machine may be busy: an example, and drawing it, may take as long as it needs. Derandomized: a failure comes again.
settings.register_profile("agentrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentrl")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Run each async test under both event loops; modules that need aiohttp override this with asyncio alone."""
    return str(request.param)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 checkpoint, made once per test session; do not write to it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture
def starts_truly() -> Generator[None]:
    """Start the processes of a test as users do, where it would fork them (`tests/support/forked_starts.py`)."""
    with true_starts():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fork the processes of many tests: of a few, the imports of a server cost more."""
    if len(items) >= MANY_TESTS:
        fork_from_now_on()
