"""Two context managers open at once and close together."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from agentrl.errors import TrainError
from agentrl.support.concurrency import enter_both


@asynccontextmanager
async def resource(name: str, log: list[str], mine: anyio.Event, other: anyio.Event) -> AsyncGenerator[str]:
    mine.set()
    await other.wait()  # only a concurrent opener gets past this
    log.append(f"open {name}")
    try:
        yield name
    finally:
        log.append(f"close {name}")


async def test_both_open_concurrently_and_both_close() -> None:
    log: list[str] = []
    a, b = anyio.Event(), anyio.Event()
    with anyio.fail_after(300):
        async with enter_both(resource("a", log, a, b), resource("b", log, b, a)) as (first, second):
            assert (first, second) == ("a", "b")
            assert len(log) == 2
    assert sorted(log) == ["close a", "close b", "open a", "open b"]


@asynccontextmanager
async def refusing() -> AsyncGenerator[str]:
    raise TrainError("no")
    yield "never"


async def test_a_failure_to_open_closes_the_other_and_is_raised_by_itself() -> None:
    log: list[str] = []
    event = anyio.Event()
    event.set()
    with pytest.raises(TrainError, match="no"):
        async with enter_both(resource("a", log, event, event), refusing()):
            pytest.fail("the block must not run")
    assert log in ([], ["open a", "close a"])


async def test_an_error_in_the_block_closes_both() -> None:
    log: list[str] = []
    event = anyio.Event()
    event.set()
    with pytest.raises(ValueError, match="mine"):
        async with enter_both(resource("a", log, event, event), resource("b", log, event, event)):
            raise ValueError("mine")
    assert sorted(log)[:2] == ["close a", "close b"]


async def test_cancelling_the_block_closes_both() -> None:
    log: list[str] = []
    event = anyio.Event()
    event.set()
    with anyio.CancelScope() as scope:
        async with enter_both(resource("a", log, event, event), resource("b", log, event, event)):
            scope.cancel()
            await anyio.sleep_forever()
    assert sorted(log)[:2] == ["close a", "close b"]
