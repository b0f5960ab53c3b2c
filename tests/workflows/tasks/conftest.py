"""The sandbox in which the solutions of tasks run."""

from __future__ import annotations

import anyio
import pytest

from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.bubblewrap import open_bubblewrap
from tests.support.sandboxes import usable_host


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def sandbox() -> BoxSandbox:
    usable_host()
    return anyio.run(open_bubblewrap)
