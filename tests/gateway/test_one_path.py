"""`agentrl serve` and a door answer the same body with the same bytes: dialects, events and refusals are one code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.client import Client, EpisodeSettings, PolicyBackend, SamplingConfig
from agentrl.tokens.renderer import Renderer
from agentrl_doors.gateway.backend import EngineBackend
from tests.support.doors import CALC, CALLING, HI, scripted_client
from tests.support.gateway import MODEL, Served, script_engine, served

BODIES: dict[str, Any] = {
    "chat/completions": {"messages": HI, "tools": [CALC], "logprobs": True},
    "responses": {"input": HI, "tools": [{"type": "function", **CALC["function"]}]},
    "messages": {
        "messages": HI,
        "max_tokens": 500,
        "tools": [{"name": "calc", "input_schema": CALC["function"]["parameters"]}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    },
}
TEXT = r'((?<="delta":\{"content":")[^"]+|(?<="delta":")[^"]+|(?<="type":"text_delta","text":")[^"]+)'
REFUSED: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"stream": "yes"},
    {"messages": 5, "input": 5},
    {"tools": [{"type": "function", "function": {"name": f"t{at}"}, "name": f"t{at}"} for at in range(1025)]},
    {"metadata": json.loads("[" * 70 + "]" * 70)},
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answers(server: Served, url: str, route: str, body: dict[str, Any]) -> tuple[int, str, list[str]]:
    """Return status, type and events of a reply, without ids and times."""
    async with server.session.post(f"{url}/{route}", json=body) as response:
        text = await response.text()
    for name in ("id", "call_id", "item_id", "created", "created_at", "sequence_number"):
        text = re.sub(rf'"{name}":("[^"]*"|\d+),?', "", text)
    return response.status, response.headers["Content-Type"], joined(text.split("\n\n"))


def joined(events: list[str]) -> list[str]:
    """Return events with those of text that follow each other as one: how much text comes at once is chance."""
    found: list[str] = []
    for event in events:
        before, text, after = (*re.split(TEXT, event), "", "")[:3]
        if text and found and found[-1].startswith(before) and found[-1].endswith(after) and "delta" in before:
            found[-1] = found[-1].removesuffix(after) + text + after
        else:
            found.append(event)
    return found


@pytest.mark.parametrize("route", BODIES)
async def test_serve_and_a_door_give_the_same_answer_whole_and_streamed_and_refuse_the_same(
    route: str, checkpoint: Path
) -> None:
    renderer = Renderer.load(checkpoint)
    engine, settings = script_engine(checkpoint, lambda _: CALLING), EpisodeSettings(episode_id="e", task_id="t")
    client = Client(PolicyBackend(EngineBackend(engine, {}), renderer, SamplingConfig(max_tokens=4000), settings))
    async with served(engine, checkpoint) as server, client.served() as door:
        for change in ({}, {"stream": True}, *REFUSED):
            body = {"model": MODEL, **BODIES[route], **change}
            alone = await answers(server, f"{server.url}/v1", route, body)
            assert await answers(server, door.base_url, route, body) == alone
            assert alone[0] == (400 if change in REFUSED else 200), alone[2]


@pytest.mark.parametrize("route", BODIES)
async def test_a_stream_of_a_call_that_names_no_model_has_the_name_of_the_served_one(route: str, checkpoint: Path) -> None:
    async with served(script_engine(checkpoint, lambda _: "fine"), checkpoint) as server:
        _, _, events = await answers(server, f"{server.url}/v1", route, {**BODIES[route], "stream": True})
    assert set(re.findall(r'"model":"(\w+)"', "".join(events))) == {MODEL}


async def test_several_choices_are_given_where_nothing_is_trained_and_refused_at_a_door(checkpoint: Path) -> None:
    body = {"messages": HI, "n": 2, "model": MODEL}
    client, _ = scripted_client([])
    async with served(script_engine(checkpoint, lambda _: "fine"), checkpoint) as server, client.served() as door:
        status, given = await server.post("/v1/chat/completions", body)
        async with server.session.post(f"{door.base_url}/chat/completions", json=body) as response:
            refused = await response.json()
    assert (status, [choice["message"]["content"] for choice in given["choices"]]) == (200, ["fine", "fine"])
    assert (response.status, refused["error"]["message"]) == (
        400,
        "n=2: one call is one turn; call several times, or leave n out",
    )
