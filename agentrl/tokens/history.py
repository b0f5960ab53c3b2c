"""The history of one episode: finds the turn that a request extends, by the meaning of its messages.

`MessageReader` remembers the messages it has read and reads only new ones. Each message has a key, and each beginning of a
conversation has a digest over the keys of its messages, by which `TurnIndex` finds turns. So the cost of a lookup depends on
the new messages and hardly on the history.

Invariant: `MessageReader.read` returns what reading all messages again would return, even if messages were changed in
place. `TurnIndex.find` returns the deepest recorded turn whose messages and output begin the request, or None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from agentrl.episode.trajectory import are_independent
from agentrl.errors import WorkflowError
from agentrl.tokens.messages import DIGEST_BYTES, calls_of, field_getter, message_key, role_of
from agentrl.types import BranchPath, Message, Turn

_MAX_CONVERSATIONS = 4
"""Conversations that an episode remembers; the reader reads all messages of any other."""
_FLAT: frozenset[type] = frozenset({dict, ChatCompletionMessage})
"""Types of messages whose shallow copy shows every change, if their fields are text."""


class ReadRequest(NamedTuple):
    """The messages of a request, as they are compared."""

    prefixes: Sequence[bytes]
    """The digest of the conversation up to each message, that message included."""
    reasoning: Mapping[int, str]
    """The reasoning that the request's assistant messages have, by position."""
    messages: Sequence[object]
    """The messages as they were read: shallow copies of mappings, and the other messages themselves."""


def next_prefix(prefix: bytes, key: bytes) -> bytes:
    """Return the digest of a conversation, from the digest without its last message and the key of that message."""
    return hashlib.blake2b(prefix + key, digest_size=DIGEST_BYTES).digest()


def continues_other_branch(turn: int, of: BranchPath, branch: BranchPath) -> WorkflowError:
    """Return the error of a request in `branch` that continues `turn`, which stands in the independent branch `of`."""
    return WorkflowError(
        f"a request of branch {list(branch)} continues turn {turn} of branch {list(of)}; client.branch() declares that "
        "neither depends on the other: continue that turn with the client that made it, or with the client that opened both "
        "branches"
    )


class MessageReader:
    """Reads the requests of one episode."""

    def __init__(self) -> None:
        self._conversations: list[RememberedConversation] = []

    def read(self, messages: Sequence[Message]) -> ReadRequest:
        """Return the keys and the reasoning of messages; a `WorkflowError` for something that is not a message."""
        known = self._longest_known(messages)
        prefixes, reasoning, as_read = known.prefixes.copy(), known.reasoning.copy(), known.messages.copy()
        remembering = True
        for at in range(len(prefixes), len(messages)):
            message = messages[at]
            if not isinstance(cast("object", message), (Mapping, BaseModel)):
                got = f"{type(message).__name__} {message!r:.80}"
                raise WorkflowError(f"messages[{at}] must be a dict or an openai message, got {got}")
            key = message_key(message)
            prefix = next_prefix(prefixes[-1] if prefixes else b"", key.digest)
            prefixes.append(prefix)
            if key.reasoning is not None:
                reasoning[at] = key.reasoning
            remembering = remembering and known.add(message, key.reasoning, prefix)
            copied = message if isinstance(cast("object", message), BaseModel) else dict(message)
            as_read.append(known.messages[at] if remembering else copied)
        return ReadRequest(prefixes, reasoning, as_read)

    def _longest_known(self, messages: Sequence[Message]) -> RememberedConversation:
        """Return the latest conversation that `messages` begins with; a new and empty one if there is none."""
        known = next((each for each in reversed(self._conversations) if each.begins(messages)), RememberedConversation())
        # The one in use goes to the end, so that the conversation forgotten first is the one unused for longest.
        others = [each for each in self._conversations if each is not known]
        self._conversations = [*others[1 - _MAX_CONVERSATIONS :], known]
        return known


class RememberedConversation:
    """Messages in the state in which they were read, with their keys."""

    __slots__ = ("_copies", "_models", "_mutable", "_types", "messages", "prefixes", "reasoning")

    def __init__(self) -> None:
        self.prefixes: list[bytes] = []
        self.reasoning: dict[int, str] = {}
        self.messages: list[object] = []
        """Shallow copies of the messages that are dicts, and the other messages themselves."""
        self._types: list[type] = []
        self._models: list[tuple[BaseModel, Message]] = []
        """The messages that are not dicts, each with a shallow copy of its fields."""
        self._mutable: list[Any] = []
        """The dicts and lists inside messages: text parts, tool calls and further fields."""
        self._copies: list[object] = []
        """Shallow copies of those."""

    def add(self, message: Message, reasoning: str | None, prefix: bytes) -> bool:
        """Remember a message; False, without remembering it, if a later change in the message would not show."""
        part = cast("Any", message)
        kind = type(part)
        if kind not in _FLAT and not _shows_changes(part):
            return False
        fields, extra = (part, None) if kind is dict else (part.__dict__, part.__pydantic_extra__)
        get = field_getter(part)
        content, calls = get("content"), get("tool_calls")
        mutable = [] if extra is None else [extra]
        if not (type(content) is str or content is None or _add_mutable_parts(content, mutable)):
            return False
        if not (calls is None or _add_mutable_parts(calls, mutable)):
            return False
        copy = fields.copy()
        if reasoning is not None:
            self.reasoning[len(self.prefixes)] = reasoning
        self.prefixes.append(prefix)
        self._types.append(kind)
        self.messages.append(copy if kind is dict else part)
        if kind is not dict:
            self._models.append((part, copy))
        self._mutable += mutable
        self._copies += [each.copy() for each in mutable]
        return True

    def begins(self, messages: Sequence[Message]) -> bool:
        """Return whether `messages` begins with these messages, unchanged."""
        top = messages[: len(self.messages)]
        same = [*map(type, top)] == self._types and top == self.messages  # a class may equal anything
        return same and self._mutable == self._copies and all(model.__dict__ == copy for model, copy in self._models)


def _add_mutable_parts(parts: object, mutable: list[Any]) -> bool:
    """Add the dicts and lists of text parts or tool calls to `mutable`; return whether they show every change."""
    if type(parts) is list:
        mutable.append(parts)
    elif type(parts) is not tuple:
        return False
    for part in cast("Sequence[object]", parts):
        if type(part) is str:
            continue
        if not _add_mutable_fields(part, mutable):
            return False
        function = field_getter(part)("function")
        if function is not None and not _add_mutable_fields(function, mutable):
            return False
        arguments = field_getter(part if function is None else function)("arguments")
        if arguments is not None and type(arguments) is not str:  # equal values may be spelled differently: 1 and True
            return False
    return True


def _add_mutable_fields(part: Any, mutable: list[Any]) -> bool:  # noqa: ANN401
    if not _shows_changes(part):
        return False
    dicts = (part, None) if type(part) is dict else (part.__dict__, part.__pydantic_extra__)
    mutable += [each for each in dicts if each is not None]
    return True


def _shows_changes(part: object) -> bool:
    """Return whether each change in a message, or in a part of one, shows in its dicts."""
    # A class that validates assignments replaces its dict, and a class with its own __eq__ may equal a changed object.
    simple = isinstance(part, BaseModel) and not part.model_config.get("validate_assignment")
    return type(part) is dict or (simple and type(part).__eq__ is BaseModel.__eq__)


class HistoryMatch(msgspec.Struct, frozen=True):
    """The meeting point of a request and the recorded conversations."""

    request: ReadRequest
    turn: int | None
    """The turn to extend: the deepest one with the same tools."""
    length: int
    """Messages of that turn's conversation, its output included; 0 without a turn."""
    length_any_tools: int
    """The same for the deepest turn with any tools."""
    edited: bool
    """Whether the rest of the request holds a changed model output, or a model output in another place."""


class TurnIndex:
    """The conversations of the recorded turns of one episode."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._reader = MessageReader()
        self._tools: list[bytes] = []
        """The key of the tools of each turn's request."""
        self.lengths: list[int] = []
        """Messages of each turn's conversation, its output included; 0 for a call made of ids."""
        self._turns_by_prefix: dict[bytes, tuple[int, ...]] = {}
        """By the digest of each beginning of a recorded conversation: the turns whose whole conversation it is."""
        self._turns_by_output: dict[bytes, int] = {}
        """The latest turn by the digest of its output."""
        self._requests: list[bytes] = []
        """The digest of each recorded request."""

    def find(self, messages: Sequence[Message], tools: bytes, branch: BranchPath = ()) -> HistoryMatch:
        """Return where a request meets the recorded conversations; none in branches independent of `branch`."""
        request = self._reader.read(messages)
        turn, length, length_any_tools = None, 0, 0
        # From the end: the deepest turn keeps the most sampled ids as they are.
        for end in range(len(messages), 0, -1):
            ending = self._turns_by_prefix.get(request.prefixes[end - 1], ())
            # Agents often drop reasoning from a history; where they send it, a changed one is another conversation.
            ending = [each for each in ending if self._has_reasoning(each, request.reasoning)]
            ending = self._in_reach(ending, branch)
            if ending:
                length_any_tools = max(length_any_tools, end)
            candidates = [each for each in ending if self._tools[each] == tools]
            if candidates:
                turn, length = self._most_similar(candidates, messages[end - 1], request.reasoning.get(end - 1)), end
                break
        answers = [at for at in range(length_any_tools, len(messages)) if role_of(messages[at]) == "assistant"]
        edited = bool(answers) and self._is_edited(messages, request, answers, length_any_tools)
        return HistoryMatch(request, turn, length, length_any_tools, edited)

    def add(self, match: HistoryMatch | None, tools: bytes, output: Message) -> None:
        """Index the turn that was recorded last; `match` is None for a call made of ids."""
        turn = len(self.lengths)
        self._tools.append(tools)
        self.lengths.append(0 if match is None else len(match.request.prefixes) + 1)
        if match is None:
            return
        prefixes = match.request.prefixes
        key = message_key(output).digest
        end = next_prefix(prefixes[-1], key)
        # The beginnings are kept too: a request that leaves the conversation there shares them.
        for prefix in prefixes[match.length :]:
            self._turns_by_prefix.setdefault(prefix, ())
        self._turns_by_prefix[end] = (*self._turns_by_prefix.get(end, ()), turn)
        self._turns_by_output[key] = turn
        self._requests.append(prefixes[-1])

    def add_shown(self, match: HistoryMatch | None, shown: Message) -> None:
        """Let a request with the answer `shown` continue the turn that was recorded last, although its output goes on."""
        if match is None:
            return
        key, turn = message_key(shown).digest, len(self.lengths) - 1
        end = next_prefix(match.request.prefixes[-1], key)
        turns = self._turns_by_prefix.get(end, ())
        self._turns_by_prefix[end] = turns if turn in turns else (*turns, turn)
        self._turns_by_output.setdefault(key, turn)

    def turn_of_output(self, message: Message) -> int | None:
        """Return the latest turn whose output means the same as `message`."""
        return self._turns_by_output.get(message_key(message).digest)

    def _in_reach(self, turns: Sequence[int], branch: BranchPath) -> Sequence[int]:
        """Return the `turns` that a request of `branch` may continue; raises `WorkflowError` if it may continue none."""
        reached = [turn for turn in turns if not are_independent(self._turns[turn].branch, branch)]
        if turns and not reached:
            raise continues_other_branch(turns[-1], self._turns[turns[-1]].branch, branch)
        return reached

    def _has_reasoning(self, turn: int | None, reasoning: Mapping[int, str]) -> bool:
        """Return whether the reasoning of a request, where it has any, is that of the turn and the turns above it."""
        while reasoning and turn is not None:
            sent = reasoning.get(self.lengths[turn] - 1)
            if sent is not None and sent.strip() != (self._turns[turn].message.get("reasoning_content") or "").strip():
                return False
            turn = self._turns[turn].parent
        return True

    def _most_similar(self, turns: Sequence[int], message: Message, reasoning: str | None) -> int:
        """Return the turn whose output `message` most likely is: same call ids, then same reasoning, then the latest."""
        if len(turns) == 1:
            return turns[0]
        ids = [call.id for call in calls_of(message)]

        def similarity(turn: int) -> tuple[bool, bool, int]:
            output = self._turns[turn].message
            same_ids = [call.id for call in calls_of(output)] == ids
            return same_ids, (output.get("reasoning_content") or None) == reasoning, turn

        return max(turns, key=similarity)

    def _is_edited(self, messages: Sequence[Message], request: ReadRequest, answers: Sequence[int], length: int) -> bool:
        """Return whether a request holds a changed or moved model output after its first `length` messages."""
        prefixes, common = request.prefixes, length
        # A conversation longer than `length` with the same keys differs in the reasoning of its output.
        for prefix in prefixes[length:]:
            if self._turns_by_prefix.get(prefix) != ():
                break
            common += 1
        if common in answers and common > 0 and prefixes[common - 1] in self._requests:
            return True
        return any(self.turn_of_output(messages[at]) is not None for at in answers if at >= common)
