"""Values that few JSON libraries take: large integers, deep nesting; and errors of the server."""

from __future__ import annotations

import json
import logging
from typing import Any

import aiohttp
import pytest

from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from tests.support.doors import CALC, HI, scripted_client

LARGE = 2**64 + 1
ROUTES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "tools": [CALC]},
    "responses": {"input": HI, "tools": [{"type": "function", **CALC["function"]}]},
    "messages": {"messages": HI, "max_tokens": 500, "tools": [{"name": "calc", "input_schema": {"type": "object"}}]},
}
VALUES: dict[str, str] = {
    "2**64+1": str(LARGE),
    "-2**63-1": str(-(2**63) - 1),
    "400 digits": "9" * 400,
    "200 levels": "[" * 200 + "]" * 200,
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def calling(value: str) -> str:
    return f'<tool_call>\n{{"name": "calc", "arguments": {{"a": {value}}}}}\n</tool_call>'


def history(route: str, answer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the body that sends an answer back as it came, with the result of its call."""
    body = dict(ROUTES[route])
    if route == "chat/completions":
        message = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
        return {**body, "messages": [*HI, message, result]}
    if route == "responses":
        call = answer["output"][-1]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        return {**body, "input": [*HI, *answer["output"], result]}
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": "5"}
    answered = {"role": "assistant", "content": answer["content"]}
    return {**body, "messages": [*HI, answered, {"role": "user", "content": [result]}]}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("route", ROUTES)
async def test_what_the_policy_writes_reaches_the_client_and_comes_back_as_it_was(route: str, value: str) -> None:
    client, _ = scripted_client([calling(VALUES[value]), "done"])
    async with client.served() as door, aiohttp.ClientSession() as http:

        async def post(body: Any) -> Any:  # noqa: ANN401
            headers, data = {"Content-Type": "application/json"}, json.dumps({"model": "policy", **body})
            async with http.post(f"{door.base_url}/{route}", data=data, headers=headers) as response:
                assert response.status == 200, await response.text()
                return json.loads(await response.read())

        answer = await post(ROUTES[route])
        if value == "2**64+1":
            assert str(LARGE) in json.dumps(answer)
        await post(history(route, answer))
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert len(trajectory.branches()) == 1
    verify(trajectory)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_integers_of_any_size_in_a_body_are_read(route: str, stream: bool) -> None:
    client, _ = scripted_client(["fine"])
    body: dict[str, Any] = {
        "model": "policy",
        "stream": stream,
        **ROUTES[route],
        "metadata": {"id": LARGE},
        "unknown": LARGE,
    }
    text = json.dumps(body).replace('"type": "object"', f'"type": "object", "maximum": {LARGE}')
    async with (
        client.served() as door,
        aiohttp.ClientSession() as http,
        http.post(f"{door.base_url}/{route}", data=text, headers={"Content-Type": "application/json"}) as response,
    ):
        assert response.status == 200, await response.text()
        await response.read()
    assert client.episode.turns[0].message["content"] == "fine"
    assert str(LARGE) in json.dumps(client.episode.turns[0].tools)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_an_error_that_nobody_expected_has_the_shape_of_the_dialect_and_says_nothing_of_the_call(
    route: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = scripted_client(["fine"])
    body = {"model": "policy", "stream": stream, **ROUTES[route]}

    class Broken(dict[str, float]):
        """Metrics of an episode that cannot be counted."""

        def get(self, *_: object) -> float:
            raise LookupError("the words of the user")

    client.episode.metrics = Broken()
    async with (
        client.served() as door,
        aiohttp.ClientSession() as http,
        http.post(f"{door.base_url}/{route}", json={**body, "unknown": 1}) as response,
    ):
        status, refusal = response.status, await response.json()
    assert status == 500
    assert (refusal.get("type") == "error") == (route == "messages")
    assert "LookupError" in refusal["error"]["message"]
    assert "the words of the user" not in str(refusal) + caplog.text
    assert [each.levelno for each in caplog.records if each.name == "agentrl_doors.gateway"] == [logging.ERROR]
    assert not client.turns
