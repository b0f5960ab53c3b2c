"""Streams that have nothing to say for long: they give signs of life, which change nothing for their readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import anyio
import pytest

from agentrl.client import DoorSettings
from agentrl.servers.scripted.script import Hold, ScriptedReply
from agentrl.types import StopReason
from agentrl_doors.gateway.sessions import open_door
from tests.support.doors import CALC, CALLING, HI, scripted_client
from tests.support.gateway import script_engine, served

DEADLINE_S = 300
BRIEF_S = 0.002
BLOCK_CALC: Any = {"name": "calc", "input_schema": CALC["function"]["parameters"]}
FLAT_CALC: Any = {"type": "function", **CALC["function"]}
BODIES: dict[str, Any] = {
    "chat/completions": {"messages": HI, "tools": [CALC]},
    "responses": {"input": HI, "tools": [FLAT_CALC]},
    "messages": {"messages": HI, "max_tokens": 500, "tools": [BLOCK_CALC]},
}
TEXT_END = b'"."'
"""In the line that brings the last token before the call."""
SIGNS = {"chat/completions": b":", "responses": b":", "messages": b"event: ping"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def holds() -> list[Hold]:
    """Return holds before the first token, and in the middle of the call that `CALLING` makes."""
    return [Hold(), Hold(at=20)]


async def release_after_signs(response: aiohttp.ClientResponse, held: list[Hold], sign: bytes) -> list[bytes]:
    """Return the lines of a stream; a hold is released when three signs of life have come during it.

    Signs of the first hold may still be on their way during the second, whose own follow the end of the text.
    """
    lines: list[bytes] = []
    for hold, before in zip(held, (b"", TEXT_END), strict=True):
        signs, has_begun = 0, False
        while signs < 3:
            lines.append(await response.content.readline())
            assert lines[-1], "the stream ends before a hold is released"
            has_begun = has_begun or before in lines[-1]
            signs += has_begun and hold.reached.is_set() and lines[-1].startswith((sign, b":"))
        hold.release.set()
    return [*lines, *[line async for line in response.content]]


@pytest.mark.parametrize("route", BODIES)
async def test_a_stream_gives_signs_of_life_before_its_first_token_and_while_a_call_is_written(route: str) -> None:
    held = holds()
    client, _ = scripted_client([ScriptedReply(output=CALLING, holds=tuple(held))])
    body = {"model": "policy", "stream": True, **BODIES[route]}
    with anyio.fail_after(DEADLINE_S):
        async with (
            open_door(client, DoorSettings(), keep_alive_s=BRIEF_S) as door,
            aiohttp.ClientSession() as http,
            http.post(f"{door.base_url}/{route}", json=body) as response,
        ):
            assert response.status == 200
            lines = await release_after_signs(response, held, SIGNS[route])
    begun = next(at for at, line in enumerate(lines) if line.startswith(b"data: "))
    assert all(line.startswith(b":") or not line.strip() or line.startswith(b"event: ") for line in lines[:begun])
    text_end = next(at for at, line in enumerate(lines) if TEXT_END in line)
    assert any(line.startswith(SIGNS[route]) for line in lines[text_end:])
    assert b"calc" in b"".join(lines)
    assert client.close(StopReason.COMPLETED, 1.0).turns[0].message["tool_calls"]


@pytest.mark.parametrize("route", BODIES)
async def test_the_clients_of_each_api_pass_over_signs_of_life(route: str, checkpoint: Path) -> None:
    calling = CALLING.replace("I add.\n", "")

    async def hold_open(held: Hold) -> None:
        await held.reached.wait()
        held.release.set()

    hold = Hold(at=1)
    engine = script_engine(checkpoint, lambda _: ScriptedReply(output=calling, holds=(hold,)))
    with anyio.fail_after(DEADLINE_S):
        async with served(engine, checkpoint, keep_alive_s=BRIEF_S) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(hold_open, hold)
            if route == "messages":
                async with (
                    anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
                    claude.messages.stream(model="tiny", **BODIES[route]) as stream,
                ):
                    message = await stream.get_final_message()
                assert message.content[0].name == "calc"  # pyright: ignore[reportAttributeAccessIssue]
            elif route == "responses":
                async with server.openai.responses.stream(model="tiny", **BODIES[route]) as stream:
                    response = await stream.get_final_response()
                assert response.output[0].name == "calc"  # pyright: ignore[reportAttributeAccessIssue]
            else:
                chunks = await server.openai.chat.completions.create(model="tiny", stream=True, **BODIES[route])
                calls = [chunk.choices[0].delta.tool_calls async for chunk in chunks if chunk.choices]
                assert any(calls)


@pytest.mark.parametrize("route", BODIES)
async def test_an_error_after_a_sign_of_life_is_the_last_event_and_one_before_it_a_status(route: str) -> None:
    held = Hold()
    client, server = scripted_client([ScriptedReply(output="never", holds=(held,))], max_turns=1)
    body = {"model": "policy", "stream": True, **BODIES[route]}
    with anyio.fail_after(DEADLINE_S):
        async with (
            open_door(client, DoorSettings(), keep_alive_s=BRIEF_S) as door,
            aiohttp.ClientSession() as http,
        ):
            async with http.post(f"{door.base_url}/{route}", json={**body, "top_p": 7}) as response:
                assert response.status == 400
            async with http.post(f"{door.base_url}/{route}", json=body) as response:
                await held.reached.wait()
                assert (await response.content.readline()).startswith(b":")
                server.die()
                last = [line for line in (await response.read()).split(b"\n") if line.startswith(b"data: ")][-1]
    error = json.loads(last.removeprefix(b"data: "))
    assert "error" in error or error["type"] == "response.failed", error
    assert not client.turns
