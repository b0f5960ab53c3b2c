"""Parsers that split the output of a model into content, reasoning and tool calls.

Invariant: parsing never raises and never loses text. Text that is not a well-formed call stays in the content, and the
message is flagged `malformed`; otherwise the content is the decoded text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the model."""

    id: str
    """Nine letters and digits, unique within an episode."""
    name: str
    arguments: str
    """JSON text of an object."""


class ParsedMessage(msgspec.Struct, frozen=True):
    r"""One model output as a message.

    Example:
        >>> parsed = parse_text("<think>\nadd\n</think>\n\nFour.", calls=None, thinking_open=False, salt="")
        >>> parsed.reasoning, parsed.content
        ('add', 'Four.')
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: bool = False
    """True when the model began a tool call that cannot be read, or did not finish its reasoning."""

    def to_message(self) -> dict[str, object]:
        """Return the assistant message in OpenAI's wire format, with `reasoning_content` if there is reasoning."""
        message: dict[str, object] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class RawCall(NamedTuple):
    """A tool call without an id."""

    name: str
    arguments: str


class ParsedCalls(NamedTuple):
    """The result of a call parser."""

    content: str
    calls: list[RawCall]
    malformed: bool


CallParser = Callable[[str], ParsedCalls]
"""Takes the text after the reasoning; returns the calls and the remaining text."""


def parse_text(text: str, *, calls: CallParser | None, thinking_open: bool, salt: object) -> ParsedMessage:
    """Return decoded model output, without its end-of-turn token and stop string, as a message.

    `calls` is None if the request had no tools; `thinking_open` says whether the prompt ended inside `<think>`; `salt` makes
    the ids of the calls unique.
    """
    thinks = thinking_open or THINK_OPEN in text
    reasoning, content, malformed = _split_reasoning(text, thinking_open) if thinks else (None, text, False)
    if calls is None or malformed:
        return ParsedMessage(content, reasoning, (), malformed)
    parsed = calls(content)
    return ParsedMessage(
        content=parsed.content,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(id=_call_id(salt, at), name=call.name, arguments=call.arguments) for at, call in enumerate(parsed.calls)
        ),
        malformed=parsed.malformed,
    )


def _split_reasoning(text: str, thinking_open: bool) -> tuple[str | None, str, bool]:
    start = text.lstrip()
    if not thinking_open and not start.startswith(THINK_OPEN):
        return None, text, False
    body = start.removeprefix(THINK_OPEN)
    reasoning, closed, content = body.partition(THINK_CLOSE)
    reasoning = reasoning.strip("\n") or None
    if not closed:
        return (reasoning, "", True) if reasoning else (None, "", True)
    return reasoning, content.lstrip("\n"), False


def _call_id(salt: object, at: int) -> str:
    number = int.from_bytes(hashlib.blake2b(f"{salt}/{at}".encode(), digest_size=8).digest(), "big")
    letters: list[str] = []
    for _ in range(9):
        number, digit = divmod(number, len(_ID_ALPHABET))
        letters.append(_ID_ALPHABET[digit])
    return "".join(letters)


def parse_hermes(text: str) -> ParsedCalls:
    r"""Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks (Hermes, Qwen2.5, Qwen3).

    Example:
        >>> parse_hermes('Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>')
        ParsedCalls(content='Let me see.', calls=[RawCall(name='add', arguments='{"a": 1}')], malformed=False)
    """
    opening, closing = "<tool_call>", "</tool_call>"
    if opening not in text:
        return ParsedCalls(text, [], False)
    head, *blocks = text.split(opening)
    kept, calls, malformed = [head], list[RawCall](), False
    for block in blocks:
        body, closed, rest = block.partition(closing)
        call = _call(body)
        if call is None:
            kept.append(opening + body + closed)
            malformed = True
        else:
            calls.append(call)
        kept.append(rest)
    content = "".join(kept)
    return ParsedCalls(content.strip() if calls else content, calls, malformed)


def parse_mistral(text: str) -> ParsedCalls:
    """Read `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]` (Mistral)."""
    opening = "[TOOL_CALLS]"
    head, found, body = text.partition(opening)
    if not found:
        return ParsedCalls(text, [], False)
    values = parse_json(body.strip())
    calls = [_as_call(value) for value in cast("list[object]", values)] if isinstance(values, list) else [None]
    good = [call for call in calls if call is not None]
    if len(good) != len(calls) or not good:
        return ParsedCalls(text, [], True)
    return ParsedCalls(head.strip(), good, False)


def parse_llama(text: str) -> ParsedCalls:
    """Read a message that is one `{"name": ..., "parameters": {...}}` (Llama 3), after an optional `<|python_tag|>`."""
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return ParsedCalls(text, [], "<|python_tag|>" in text)
    calls = [_call(part, key="parameters") for part in _split_objects(body)]
    good = [call for call in calls if call is not None]
    if len(good) == len(calls) and good:
        return ParsedCalls("", good, False)
    return ParsedCalls(text, [], '"name"' in body)


def _split_objects(body: str) -> list[str]:
    decoder = json.JSONDecoder()
    parts: list[str] = []
    at = 0
    while at < len(body):
        try:
            _, end = decoder.raw_decode(body, at)
        except (ValueError, RecursionError):
            return [body]
        parts.append(body[at:end])
        at = end
        while at < len(body) and body[at] in "; \n\t":
            at += 1
    return parts


def parse_json(text: str) -> object | None:
    """Return the JSON value of `text`; None if it is not JSON (or the JSON null)."""
    try:
        return cast("object", json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _call(text: str, key: str = "arguments") -> RawCall | None:
    return _as_call(parse_json(text.strip()), key)


def _as_call(value: object, key: str = "arguments") -> RawCall | None:
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, object]", value)
    name, arguments = fields.get("name"), fields.get(key, {})
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):  # some models write the object as a JSON string
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        name.encode()
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # an infinite number, or half a character in the name
        return None
    return RawCall(name, text if text.isascii() or _is_unicode(text) else json.dumps(arguments))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


CALL_PARSERS: Mapping[str, tuple[str, CallParser]] = {
    "hermes": ("<tool_call>", parse_hermes),
    "mistral": ("[TOOL_CALLS]", parse_mistral),
    "llama": ('"parameters": ', parse_llama),
}
"""Known tool-call formats: the text that marks the format in a chat template, and its parser. The first match is used."""


def choose_parser(template_source: str) -> CallParser | None:
    """Return the parser of the tool-call format that a chat template contains; None if it contains no known format."""
    for marker, parser in CALL_PARSERS.values():
        if marker in template_source:
            return parser
    return None
