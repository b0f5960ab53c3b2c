"""What is left of an episode when it is closed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

from agentrl.client import Client
from agentrl.types import StopReason

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


async def test_a_closed_episode_is_freed_without_the_garbage_collector(make_client: Callable[..., Client]):
    client = make_client()
    await client.chat.completions.create(model="any", messages=MESSAGES)
    await client.chat.completions.with_raw_response.create(model="any", messages=MESSAGES)
    chunks = [chunk async for chunk in await client.chat.completions.create(model="any", messages=MESSAGES, stream=True)]
    assert chunks
    graph = weakref.ref(client.graph)
    gc.disable()
    try:
        trajectory = client.close(StopReason.COMPLETED, 1.0)
        del client, chunks
        assert graph() is None
    finally:
        gc.enable()
    assert len(trajectory.turns) == 3
