"""The conversations of an episode whose model is remote: finds the turn that a request continues.

Invariant: a request continues the latest turn whose messages and answer it begins with. Answers are compared by role, text
and tool calls, because clients drop and add other fields; other messages by all fields that are not null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentrl.tokens.messages import field_getter, plain_fields
from agentrl.types import Message


class Continued(NamedTuple):
    """Where a request meets the conversations so far."""

    parent: int | None
    """The turn that it continues; None: it starts a conversation."""
    conversation: tuple[Message, ...]
    """All of its messages."""
    added: tuple[Message, ...]
    """Those after the answer of `parent`."""


class Conversations:
    """The requests and answers of the recorded turns.

    Example:
        >>> known, question = Conversations(), {"role": "user", "content": "2 + 2 = ?"}
        >>> known.add(known.find([question]), {"role": "assistant", "content": "4"})
        >>> answer, thanks = {"role": "assistant", "content": "4"}, {"role": "user", "content": "thanks"}
        >>> known.find([question, answer, thanks]).parent, known.find([thanks]).parent
        (0, None)
    """

    def __init__(self) -> None:
        """Start without turns."""
        self._turns: list[tuple[Message, ...]] = []

    def find(self, messages: Sequence[object]) -> Continued:
        """Return where a request of `messages`, mappings or openai objects, meets the recorded turns."""
        # Shallow copies, because a workflow may change a message in place later.
        conversation = tuple([dict(message) for message in plain_fields(messages)])
        for turn in reversed(range(len(self._turns))):
            known = self._turns[turn]
            if len(known) <= len(conversation) and all(map(_same, known, conversation)):
                return Continued(turn, conversation, conversation[len(known) :])
        return Continued(None, conversation, conversation)

    def add(self, request: Continued, answer: Message) -> None:
        """Record a turn: a request and its answer."""
        self._turns.append((*request.conversation, answer))


def _same(known: Message, given: Message) -> bool:
    if known is given or known == given:
        return True
    if known.get("role") != given.get("role"):
        return False
    if known.get("role") == "assistant":
        return _stripped(known) == _stripped(given) and _called(known) == _called(given)
    return _given(known) == _given(given)


def _given(message: Message) -> Mapping[str, object]:
    return {name: value for name, value in message.items() if value is not None}


def _stripped(message: Message) -> object:
    content = message.get("content")
    return content.strip() if isinstance(content, str) else content or ""


def _called(message: Message) -> list[tuple[object, object]]:
    calls: list[tuple[object, object]] = []
    given = message.get("tool_calls")
    for call in given if isinstance(given, Sequence) else ():
        function = field_getter(field_getter(call)("function"))
        calls.append((function("name"), function("arguments")))
    return calls
