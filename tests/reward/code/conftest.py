"""The sandbox of this machine, in which submissions run."""

from __future__ import annotations

import anyio
import pytest

from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.bubblewrap import open_bubblewrap
from tests.support.sandboxes import usable_host


@pytest.fixture(scope="session")
def sandbox() -> BoxSandbox:
    """A sandbox that has passed its self-test; a machine without the primitives skips what needs it."""
    usable_host()
    return anyio.run(open_bubblewrap)
