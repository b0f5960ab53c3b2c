"""Images and files in calls at a door: refused by name, or replaced by a short text and counted."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from agentrl.client import Door, DoorSettings
from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from tests.support.doors import scripted_client

OMIT = DoorSettings(images="omit")
PNG = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PNG}"
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def chat(part: dict[str, Any], role: str = "user") -> dict[str, Any]:
    content = [{"type": "text", "text": "Look: "}, part]
    if role == "user":
        return {"messages": [{"role": "user", "content": content}]}
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    return {"messages": [*history, {"role": "tool", "tool_call_id": "c1", "content": content}]}


def messages(block: dict[str, Any], *, of_tool: bool) -> dict[str, Any]:
    content = [{"type": "text", "text": "Look:"}, block]
    user = {"role": "user", "content": content}
    if not of_tool:
        return {"max_tokens": 9, "messages": [user]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]}
    given = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": content}]}
    return {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}, called, given]}


def responses(part: dict[str, Any], *, of_tool: bool) -> dict[str, Any]:
    content = [{"type": "input_text", "text": "Look:"}, part]
    if not of_tool:
        return {"input": [{"role": "user", "content": content}]}
    called = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "c1", "output": content}
    return {"input": [{"role": "user", "content": "Hi"}, called, given]}


IMAGE_URL = {"type": "image_url", "image_url": {"url": URL}}
INPUT_IMAGE = {"type": "input_image", "image_url": URL}
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "messages[].image_url": ("chat/completions", chat(IMAGE_URL), "image"),
    "messages[].image_url of a tool": ("chat/completions", chat(IMAGE_URL, "tool"), "image"),
    "messages[].input_audio": ("chat/completions", chat({"type": "input_audio", "input_audio": {}}), "audio"),
    "messages[].file": ("chat/completions", chat({"type": "file", "file": {"file_id": "f"}}), "file"),
    "messages[].image": ("messages", messages(BLOCK, of_tool=False), "image"),
    "messages[].image of a tool": ("messages", messages(BLOCK, of_tool=True), "image"),
    "messages[].document of a tool": ("messages", messages({**BLOCK, "type": "document"}, of_tool=True), "document"),
    "input[].input_image": ("responses", responses(INPUT_IMAGE, of_tool=False), "image"),
    "input[].input_image of a tool": ("responses", responses(INPUT_IMAGE, of_tool=True), "image"),
    "input[].input_file": ("responses", responses({"type": "input_file", "file_id": "f"}, of_tool=False), "file"),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def post(door: Door, route: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{door.base_url}/{route}", json=body) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("name", CALLS)
async def test_an_image_is_refused_or_a_text_takes_its_place_and_is_counted(name: str):
    route, body, shown = CALLS[name]
    client, _ = scripted_client(["fine"])
    async with client.served(OMIT) as door:
        status, reply = await post(door, route, body)
    assert status == 200, reply
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    verify(trajectory)
    last = trajectory.turns[0].messages[-1]["content"]
    text = last if isinstance(last, str) else "".join(part["text"] for part in last)
    assert text.split() == ["Look:", f"[{shown}", "omitted]"]
    assert trajectory.metrics[f"gateway.ignored.{name.removesuffix(' of a tool')}"] == 1.0

    client, policy = scripted_client(["fine"])
    async with client.served() as door:
        status, reply = await post(door, route, body)
    assert status == 400
    assert not policy.calls
    assert "text" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("messages", messages({"type": "hologram"}, of_tool=True)),
        ("responses", responses({"type": "hologram"}, of_tool=False)),
    ],
)
async def test_a_part_of_an_unknown_type_is_refused_where_images_are_omitted(route: str, body: dict[str, Any]):
    client, _ = scripted_client(["fine"])
    async with client.served(OMIT) as door:
        status, reply = await post(door, route, body)
    assert status == 400
    assert "hologram" in reply["error"]["message"]


async def test_tokens_of_a_call_with_an_omitted_image_are_counted():
    client, _ = scripted_client([])
    async with client.served(OMIT) as door:
        status, reply = await post(door, "messages/count_tokens", messages(BLOCK, of_tool=True))
    assert (status, set(reply)) == (200, {"input_tokens"})
