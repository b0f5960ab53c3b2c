"""The sandbox of this machine."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.bubblewrap import open_bubblewrap
from agentrl_sandbox.bubblewrap.host import Host
from agentrl_sandbox.types import Limits
from tests.support.sandboxes import usable_host


@pytest.fixture(scope="session")
def host() -> Host:
    """The programs of this machine; a machine without bubblewrap or without user namespaces skips what needs them."""
    return usable_host()


@pytest.fixture(scope="session")
def sandbox(host: Host) -> BoxSandbox:
    """A sandbox that has passed its self-test, which must not fail where bubblewrap can start.

    Its programs have a minute: the machine may be busy, and a test that wants a timeout brings its own limit.
    """
    del host
    return anyio.run(partial(open_bubblewrap, limits=Limits(wall_s=60)))
