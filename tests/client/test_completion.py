"""The completions a turn becomes are those that validating their fields gives."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from agentrl.client.backend import Answer
from agentrl.client.completion import completion
from agentrl.inference.backend import Generation
from agentrl.types import Int32Array, StopReason, VersionSpan

CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "assistant", "content": "Four"},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "Four", "reasoning_content": "two and two"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "assistant", "content": "So:", "tool_calls": [CALL, CALL], "reasoning_content": "add"},
]
LOGPROBS = {"content": [{"token": "F", "bytes": None, "logprob": -0.5, "top_logprobs": [], "token_id": 5}], "refusal": None}


def generation(stop_reason: StopReason, cached: int) -> Generation:
    return Generation(
        output_ids=np.array([5, 6, 7], np.int32),
        output_logprobs=np.array([-0.5, -1.0, 0.0], np.float32),
        spans=(VersionSpan(start=0, end=3, version=0),),
        stop_reason=stop_reason,
        cached_tokens=cached,
    )


def answer(
    message: dict[str, Any],
    sampled: Generation,
    logprobs: dict[str, Any] | None = None,
    prompt_ids: Int32Array | None = None,
) -> Answer:
    return Answer(
        id="chatcmpl-1",
        model="m",
        message=message,
        generation=sampled,
        num_context=11,
        logprobs=logprobs,
        prompt_ids=prompt_ids,
    )


def validated(
    made: ChatCompletion,
    message: dict[str, Any],
    *,
    cached: int,
    logprobs: dict[str, Any] | None,
    prompt_ids: Int32Array | None,
) -> ChatCompletion:
    reason = "length" if made.choices[0].finish_reason == "length" else "tool_calls" if message.get("tool_calls") else "stop"
    said = {**message, "content": message["content"] or (None if message.get("tool_calls") else "")}
    usage: dict[str, Any] = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
    if cached:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "message": said, "token_ids": [5, 6, 7]}
    fields = {"id": "chatcmpl-1", "object": "chat.completion", "created": made.created, "model": "m", "usage": usage}
    more = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids.tolist()}
    choices = [choice if logprobs is None else {**choice, "logprobs": logprobs}]
    return ChatCompletion.model_validate({**fields, "choices": choices, **more})


def state(model: Any) -> Any:  # noqa: ANN401
    """Everything an openai object holds, with the names that were set and the classes."""
    if isinstance(model, BaseModel):
        held = {name: state(value) for name, value in vars(model).items()}
        return type(model), held, state(model.model_extra), model.model_fields_set, model.__pydantic_private__
    return [state(item) for item in model] if isinstance(model, list) else model  # pyright: ignore[reportUnknownVariableType]


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("stop_reason", [StopReason.STOP, StopReason.LENGTH])
@pytest.mark.parametrize("cached", [0, 4])
@pytest.mark.parametrize("logprobs", [None, LOGPROBS])
@pytest.mark.parametrize("prompt_ids", [None, np.arange(11, dtype=np.int32)])
def test_a_completion_is_what_validation_would_return(
    message: dict[str, Any],
    stop_reason: StopReason,
    cached: int,
    logprobs: dict[str, Any] | None,
    prompt_ids: Int32Array | None,
):
    sampled = generation(stop_reason, cached)
    made = completion(answer(message, sampled, logprobs=logprobs, prompt_ids=prompt_ids))
    expected = validated(made, message, cached=cached, logprobs=logprobs, prompt_ids=prompt_ids)
    assert made == expected
    assert state(made) == state(expected)
    assert made.model_dump_json(exclude_unset=True) == expected.model_dump_json(exclude_unset=True)
    for twin in (copy.deepcopy(made), made.model_copy(deep=True)):
        assert state(twin) == state(expected)


def test_completions_share_nothing_that_can_change():
    message, sampled = dict(MESSAGES[0]), generation(StopReason.STOP, 0)
    first, second, third = (completion(answer(message, sampled)) for _ in range(3))
    first.choices[0].message.refusal = "no"
    first.choices[0].message.content = "Five"
    extra: Any = first.choices[0].message
    extra.reasoning_content = "five"
    second.created = third.created  # they may be made in two seconds
    assert state(second) == state(third)
    assert message == MESSAGES[0]
