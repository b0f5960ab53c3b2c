"""The conversations of an episode whose model is remote: finds the turn that a request continues.

Invariant: a request continues the latest turn whose messages and answer it begins with. Answers are compared by role, text
and tool calls, because clients drop and add other fields; other messages by all fields that are not null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentrl.tokens.history import continues_other_branch
from agentrl.tokens.messages import field_getter, plain_fields
from agentrl.types import BranchPath, Message
from agentrl.validation import are_independent


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
        self._branches: list[BranchPath] = []
        """The declared branch of each turn."""

    def find(self, messages: Sequence[object], branch: BranchPath = ()) -> Continued:
        """Return where a request of `messages`, mappings or openai objects, meets the recorded turns.

        Raises:
            WorkflowError: all turns of that conversation are of branches that were declared independent of `branch`.
        """
        # Shallow copies, because a workflow may change a message in place later.
        conversation = tuple([dict(message) for message in plain_fields(messages)])
        own, foreign, length, foreign_length = None, None, 0, 0
        for turn in reversed(range(len(self._turns))):
            known, is_foreign = self._turns[turn], are_independent(self._branches[turn], branch)
            if len(known) <= max(length, foreign_length) if is_foreign else own is not None:
                continue  # what is settled is not compared again: a conversation of n turns takes n comparisons
            if len(known) <= len(conversation) and all(map(_same, known, conversation)):
                if is_foreign:
                    foreign, foreign_length = turn, len(known)
                else:
                    own, length = turn, len(known)
        if foreign is not None and foreign_length > length:
            raise continues_other_branch(foreign, self._branches[foreign], branch)
        return Continued(own, conversation, conversation[length:])

    def add(self, request: Continued, answer: Message, branch: BranchPath = ()) -> None:
        """Record a turn: a request, its answer, and its declared branch."""
        self._turns.append((*request.conversation, answer))
        self._branches.append(branch)


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
