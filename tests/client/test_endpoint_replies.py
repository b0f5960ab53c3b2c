"""What an endpoint may answer: a whole completion is a turn, anything else a named error and no turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl.client import Client
from agentrl.errors import ReplyError, WorkflowError
from agentrl.types import StopReason
from tests.support.chat import HI
from tests.support.endpoints import Endpoint, endpoint_client, serving


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def whole(message: dict[str, Any] | None, finish: str | None = "stop", **fields: Any) -> bytes:  # noqa: ANN401
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return json.dumps({"id": "c", "created": 1, "model": "m", "choices": [choice], **fields}).encode()


def events(*deltas: dict[str, Any], finish: str | None = None, **fields: Any) -> bytes:  # noqa: ANN401
    """A stream of these deltas; the last one has the finish reason."""
    lines = list[str]()
    for at, delta in enumerate(deltas):
        choice = {"index": 0, "delta": delta, "finish_reason": finish if at == len(deltas) - 1 else None}
        lines.append(json.dumps({"id": "c", "created": 1, "model": "m", "choices": [choice], **fields}))
    return "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]).encode()


NOBODY = {"role": "assistant", "content": ""}
CALL = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
SAMPLED_ONE = {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
SAMPLED_NONE = {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}


async def ask(client: Client, stream: bool) -> None:
    if stream:
        async for _ in await client.chat.completions.create(messages=HI, stream=True):
            pass
    else:
        await client.chat.completions.create(messages=HI)


@pytest.mark.parametrize(
    ("stream", "raw", "got"),
    [
        (True, events({"content": "The ans"}), "breaks off without a finish_reason: {'content': 'The ans'}"),
        (True, events({"content": "The ans"}).replace(b"data: [DONE]", b""), "breaks off without a finish_reason"),
        (True, events({"tool_calls": [CALL]}), "breaks off without a finish_reason"),
        (True, events(), "a stream without chunks"),
        (True, b"", "a stream without chunks"),
        (True, events(NOBODY, {}, finish="stop"), "an empty one, with finish_reason 'stop'"),
        (True, events({"content": "x"}, finish="abort"), "the endpoint cut, with finish_reason 'abort'"),
        (True, b"data: {oops\n\n", "not JSON"),
        (True, b'data: {"foo": 1}\n\n', "choices=None"),
        (True, b"data: [1]\n\n", r"\[1\]"),
        (False, whole(NOBODY), "an empty one, with finish_reason 'stop'"),
        (False, whole({**NOBODY, "content": None}, usage=SAMPLED_NONE), "an empty one"),
        (False, whole({**NOBODY, "tool_calls": []}, "tool_calls"), "an empty one, with finish_reason 'tool_calls'"),
        (False, whole({**NOBODY, "content": "x"}, None), "breaks off without a finish_reason"),
        (False, whole({**NOBODY, "content": "x"}, "error"), "the endpoint cut, with finish_reason 'error'"),
        (False, whole({**NOBODY, "content": "x"}, "content_filter"), "the endpoint cut"),
        (False, whole(None), "message=None"),
        (False, whole(NOBODY, choices=[]), r"choices=\[\]"),
        (False, b'{"foo": 1}', "choices=None"),
        (False, b"[1]", r"list \[1\]"),
        (False, b"<html>", "not JSON"),
    ],
)
async def test_a_reply_that_is_not_whole_is_a_named_error_and_no_turn(stream: bool, raw: bytes, got: str):
    endpoint = Endpoint()
    endpoint.raw = raw
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection, max_turns=1)
        with pytest.raises(ReplyError, match=rf"episode e, http://127\.0.*expected a chat completion.*{got}.*call again"):
            await ask(client, stream)
        endpoint.raw = None
        await ask(client, stream)
        trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert [turn.message["content"] for turn in trajectory.turns] == ["Hello there"]


@pytest.mark.parametrize(
    ("stream", "raw", "reason"),
    [
        (False, whole(NOBODY, usage=SAMPLED_ONE), StopReason.STOP),
        (False, whole({**NOBODY, "content": None}, "length", usage=SAMPLED_ONE), StopReason.LENGTH),
        (False, whole({**NOBODY, "reasoning": "Hm"}, "length"), StopReason.LENGTH),
        (False, whole({**NOBODY, "reasoning_content": "Hm"}), StopReason.STOP),
        (False, whole({**NOBODY, "refusal": "No"}), StopReason.STOP),
        (False, whole({**NOBODY, "content": "x"}, "eos"), StopReason.STOP),
        (True, events(NOBODY, {"tool_calls": [CALL]}, finish="tool_calls"), StopReason.STOP),
        (True, events(NOBODY, {}, finish="stop", usage=SAMPLED_ONE), StopReason.STOP),
        (True, events({"content": "x"}, finish="length").replace(b"data: [DONE]", b""), StopReason.LENGTH),
    ],
)
async def test_what_a_model_ended_itself_is_a_turn_however_little_it_says(stream: bool, raw: bytes, reason: StopReason):
    endpoint = Endpoint()
    endpoint.raw = raw
    async with serving(endpoint.answer) as connection:
        client = endpoint_client(connection)
        await ask(client, stream)
        assert [turn.stop_reason for turn in client.close(StopReason.COMPLETED, 1.0).turns] == [reason]


async def test_a_stream_argument_that_is_no_bool_is_refused():
    async with serving(Endpoint().answer) as connection:
        wrong: Any = 1
        with pytest.raises(WorkflowError, match="stream must be True or False, got int 1"):
            await endpoint_client(connection).chat.completions.create(messages=HI, stream=wrong)
