"""What a workflow may pass as messages, checked before the token graph reads them.

Invariant: no message is dropped, reordered or reworded, and what the caller passed is never modified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, cast

from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from agentrl.errors import WorkflowError
from agentrl.types import Message

MessageLike: TypeAlias = Mapping[str, object] | BaseModel
"""A message as a mapping, or as the openai object a completion carries."""
_USUAL = frozenset({dict, ChatCompletionMessage})


def checked_messages(messages: Iterable[MessageLike]) -> list[Message]:
    """Return the messages as the token graph takes them: the same objects.

    Raises:
        WorkflowError: for an empty conversation, or something that is not a message.
    """
    if type(messages) is not list and (isinstance(messages, (str, Mapping, BaseModel)) or not hasattr(messages, "__iter__")):
        raise WorkflowError(f"messages must be a list of messages, got {type(messages).__name__} {messages!r:.80}")
    checked: list[object] = [*messages]
    if not checked:
        raise WorkflowError("messages is empty; a model call needs at least one message")
    # Nearly all messages are plain dicts or were made by this client; asking their exact type is ten times cheaper.
    if not _USUAL.issuperset(map(type, checked)):
        for index, message in enumerate(checked):
            if not isinstance(message, (Mapping, BaseModel)):
                raise WorkflowError(
                    f"messages[{index}] must be a dict or an openai message, got {type(message).__name__} {message!r:.80}"
                )
    return cast("list[Message]", checked)
