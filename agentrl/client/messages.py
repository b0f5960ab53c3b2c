"""What a workflow may pass as messages: a list, checked here, of messages, which the token graph checks as it reads them.

Invariant: no message is dropped, reordered or reworded, and what the caller passed is never modified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel

from agentrl.errors import WorkflowError
from agentrl.types import Message

MessageLike: TypeAlias = Mapping[str, object] | BaseModel
"""A message as a mapping, or as the openai object a completion carries."""


def checked_messages(messages: Iterable[MessageLike]) -> list[Message]:
    """Return the messages as the token graph takes them: the same objects. The graph checks each as it reads it.

    Raises:
        WorkflowError: for an empty conversation, or something that is no list of messages.
    """
    if type(messages) is not list and (isinstance(messages, (str, Mapping, BaseModel)) or not hasattr(messages, "__iter__")):
        raise WorkflowError(f"messages must be a list of messages, got {type(messages).__name__} {messages!r:.80}")
    checked: list[Any] = [*messages]
    if not checked:
        raise WorkflowError("messages is empty; a model call needs at least one message")
    return checked
