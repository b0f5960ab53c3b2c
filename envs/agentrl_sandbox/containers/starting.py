"""Limits concurrent starts of environments, since a start costs far more than a running environment."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from agentrl.errors import EnvironmentFault
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers.protocol import START_S


@asynccontextmanager
async def turn_to_start(starting: anyio.Semaphore) -> AsyncGenerator[None]:
    """Hold one of the turns to start; they are given in the order in which they were asked for.

    Raises:
        EnvironmentFault: it did not come within `START_S`.
    """
    with anyio.move_on_after(START_S) as patience, outside_work():
        await starting.acquire()
    if patience.cancelled_caught:
        raise EnvironmentFault(f"containers: an environment waited {START_S:g} s for its turn to start; start fewer")
    try:
        yield
    finally:
        starting.release()
