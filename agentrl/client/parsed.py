"""`chat.completions.parse`: answers as objects of a pydantic model.

Invariant: an answer that is no such object raises nothing, because a policy that learns writes many: its `parsed` is None,
its `content` is as it was written, and its `refusal` says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from openai import omit
from openai.lib._parsing import parse_chat_completion, type_to_response_format_param
from openai.types.chat import ChatCompletion, ParsedChatCompletion
from pydantic import ValidationError

from agentrl.errors import WorkflowError


def response_format_of(kind: object) -> object:
    """Return the `response_format` argument that asks for objects of `kind`; None without one.

    Raises:
        WorkflowError: `kind` is no pydantic model and no dataclass.
    """
    if kind is None:
        return None
    try:
        return type_to_response_format_param(cast("type", kind))
    except TypeError as error:
        raise WorkflowError(f"model call: response_format must be a pydantic model, got {kind!r:.80}: {error}") from error


def parsed_completion(completion: ChatCompletion, kind: object, tools: Iterable[Any] | None) -> ParsedChatCompletion[Any]:
    """Return a completion with its text and the arguments of its strict tools as objects."""
    cut = completion.choices[0].finish_reason == "length"
    if not cut:
        try:
            return parse_chat_completion(
                response_format=omit if kind is None else cast("type[Any]", kind),
                input_tools=omit if tools is None else tools,
                chat_completion=completion,
            )
        except ValidationError as error:
            problem = str(error)
        except ValueError as error:
            problem = f"the arguments of a tool call are no JSON: {error}"
    else:
        problem = "the answer was cut at its token limit"
    fields = completion.to_dict(mode="json")
    parsed = ParsedChatCompletion[Any].model_validate(fields)
    message = parsed.choices[0].message
    message.refusal = message.refusal or f"this is not what was asked for: {problem}"
    return parsed
