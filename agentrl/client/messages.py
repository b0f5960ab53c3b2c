"""What a workflow may pass as messages, checked before the token graph reads them.

Invariant: no message is dropped, reordered or reworded, and what the caller passed is never modified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from agentrl.errors import WorkflowError
from agentrl.types import Message

MessageLike: TypeAlias = Mapping[str, object] | BaseModel
"""A message as a mapping, or as the openai object a completion carries."""


def checked_messages(messages: Iterable[MessageLike]) -> list[Message]:
    """Return the messages as the token graph takes them: the same objects, but `developer` as the `system` templates know.

    Raises:
        WorkflowError: for an empty conversation, or something that is not a message.
    """
    if isinstance(messages, (str, Mapping, BaseModel)):
        raise WorkflowError(f"messages must be a list of messages, got one {type(messages).__name__}")
    # Nearly all messages are plain dicts or were made by this client; asking their exact type is ten times cheaper.
    checked = [
        message
        if (kind := type(message)) is ChatCompletionMessage or (kind is dict and message.get("role") != "developer")
        else _checked(message, index)
        for index, message in enumerate(cast("Iterable[Any]", messages))
    ]
    if not checked:
        raise WorkflowError("messages is empty; a model call needs at least one message")
    return checked


def _checked(message: object, index: int) -> Message:
    if isinstance(message, BaseModel):
        # The graph reads objects by attribute, and knows one it has seen by its identity: a copy would cost that.
        if getattr(message, "role", None) == "developer":
            return {**message.model_dump(exclude_none=True), "role": "system"}
        return cast("Message", message)
    if not isinstance(message, Mapping):
        raise WorkflowError(
            f"messages[{index}] must be a dict or an openai message, got {type(message).__name__} {message!r:.80}"
        )
    fields = cast("Message", message)
    return {**fields, "role": "system"} if fields.get("role") == "developer" else fields
