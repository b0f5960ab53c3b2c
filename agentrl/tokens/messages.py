"""Messages: their meaning (for comparison) and their form for a template (plain JSON).

Invariant: two messages with the same `MessageKey.digest` mean the same thing to a model. The meaning leaves out the order of
keys, `None` and unknown fields, ids of tool calls, the JSON spelling of tool arguments, white space around assistant text,
the difference between `developer` and `system`, and reasoning, which clients drop; `MessageKey.reasoning` keeps it. Text of
a subclass of `str` (a member of `class Move(str, Enum)`) means its characters, whatever its `__str__` returns.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from agentrl.errors import TokenError
from agentrl.tokens.parse import parse_json
from agentrl.tokens.template.probing import CallStyle
from agentrl.tokens.template.rendering import PlainMessage, Roles, ToolSchemas
from agentrl.types import Message

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
"""Roles a message may have. Templates build control tokens out of the role, so it is not free text."""

DIGEST_BYTES = 16

_INLINE_THINKING = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def field_getter(source: object) -> Callable[[str], Any]:
    """Return `get(name)` for a message or a part of one; each is a mapping or an object, such as openai's."""
    if type(source) is dict:
        return cast("dict[str, Any]", source).get
    if isinstance(source, BaseModel):
        # getattr of a field that a model lacks takes a microsecond
        fields, extra = source.__dict__, source.__pydantic_extra__
        return fields.get if not extra else lambda name: fields[name] if name in fields else extra.get(name)
    if isinstance(source, Mapping):
        return cast("Mapping[str, Any]", source).get
    return lambda name: getattr(source, name, None)


class ToolCallFields(NamedTuple):
    """The fields of one tool call in a message."""

    id: str | None
    name: str
    arguments: object
    """JSON text as the wire writes it, or an already parsed value."""


class Thinking(NamedTuple):
    """Assistant text split at its reasoning."""

    reasoning: str | None
    content: str


def role_of(message: object) -> str:
    """Return the role of a message; a `TokenError` if it has none, or one outside `ROLES`."""
    role = field_getter(message)("role")
    if not isinstance(role, str) or role not in ROLES:
        raise TokenError(f"message role: expected one of {sorted(ROLES)}, got {role!r}")
    return str.__str__(role)


def roles_of(messages: Sequence[PlainMessage]) -> Roles:
    """Return the roles of messages."""
    return tuple(["call" if message.get("tool_calls") else str(message["role"]) for message in messages])


def text_of(content: object, where: str) -> str:
    """Return message content as text: None as empty text, text parts joined; a `TokenError` for anything but text."""
    if isinstance(content, str):
        return str.__str__(content)
    if content is None:
        return ""
    if isinstance(content, Sequence):
        return "".join(_part_text(part, where) for part in cast("Sequence[object]", content))
    raise TokenError(f"{where}: content must be text or a list of text parts, got {type(content).__name__}")


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    get = field_getter(part)
    kind = get("type")
    text = get("refusal") if kind == "refusal" else get("text")
    if kind in ("text", "refusal", "input_text", "output_text", None) and isinstance(text, str):
        return text
    raise TokenError(f"{where}: only text parts can be rendered into tokens, got a part of type {kind!r}")


def calls_of(message: object) -> list[ToolCallFields]:
    """Return the tool calls of a message, in order; none is an empty list.

    Raises:
        TokenError: if one has no function name, or the message uses the older `function_call` field.
    """
    get = field_getter(message)
    if get("function_call") is not None:
        raise TokenError("message field function_call is not supported; use tool_calls")
    calls: list[ToolCallFields] = []
    given: object = get("tool_calls") or ()
    if not isinstance(given, Sequence):
        raise TokenError(f"message field tool_calls: expected a list of calls, got {type(given).__name__} {given!r:.80}")
    for raw in cast("Sequence[object]", given):
        call = field_getter(raw)
        function = call("function")
        inner = field_getter(raw if function is None else function)
        name, call_id = inner("name"), call("id")
        if not isinstance(name, str):
            raise TokenError(f"tool call: expected a function with a name, got {raw!r}")
        arguments = inner("arguments")
        call_id = str.__str__(call_id) if isinstance(call_id, str) else None
        calls.append(ToolCallFields(call_id, str.__str__(name), {} if arguments is None else arguments))
    return calls


def split_thinking(text: str) -> Thinking:
    """Return assistant text without a leading `<think>...</think>` block, and the block's text."""
    match = _INLINE_THINKING.match(text) if "</think>" in text else None
    if match is None:
        return Thinking(None, text)
    return Thinking(match[1].strip("\n"), match[2].lstrip("\n"))


def reasoning_of(message: object) -> str | None:
    """Return the reasoning of a message, from a field of its own or from its text; None if it has none."""
    get = field_getter(message)
    content = get("content")
    return _reasoning_and_text(get, content if isinstance(content, str) else "")[0]


def _reasoning_and_text(get: Callable[[str], Any], text: str) -> tuple[str | None, str]:
    inline, text = split_thinking(text) if "</think>" in text else (None, text)
    for name in ("reasoning_content", "reasoning", "thinking"):
        value = get(name)
        if isinstance(value, str) and value:
            return str.__str__(value), text
    return inline, text


def plain_fields(messages: Sequence[object]) -> tuple[Message, ...]:
    """Return the messages as mappings: openai objects without the fields that are null, and mappings as they are."""
    return tuple([_fields(message) for message in messages])


def _fields(message: object) -> Message:
    if isinstance(message, BaseModel):
        return message.model_dump(exclude_none=True, warnings=False)
    return cast("Message", message)


class MessageKey(NamedTuple):
    """The meaning of a message, for comparison."""

    digest: bytes
    """`DIGEST_BYTES` bytes, equal for messages of equal meaning."""
    reasoning: str | None
    """The reasoning of an assistant message; None if it has none."""


def message_key(message: object) -> MessageKey:
    """Return the key of a message."""
    get = field_getter(message)
    role, content = get("role"), get("content")
    if type(role) is not str or role not in ROLES:
        role = role_of(message)
    if type(content) is not str:
        content = text_of(content, f"{role} message")
    if role != "assistant":
        name = str.__str__(name) if isinstance(name := get("name"), str) else ""
        role = "system" if role == "developer" else role
        return MessageKey(_digest(f"{len(role)},{len(content)},{len(name)};{role}{content}{name}"), None)
    reasoning, content = _reasoning_and_text(get, content)
    content = content.strip()
    if get("tool_calls") is None and get("function_call") is None:
        return MessageKey(_digest(f"9,{len(content)},0;assistant{content}"), reasoning)
    fields = [role, content, ""]
    for call in calls_of(message):
        fields += (call.name, canonical_arguments(call.arguments))
    return MessageKey(_digest(f"{','.join([str(len(field)) for field in fields])};{''.join(fields)}"), reasoning)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def canonical_arguments(arguments: object) -> str:
    """Return the same text for all spellings of a JSON value: sorted keys, no spaces, 1.0 as 1."""
    value = parse_arguments(arguments)
    if value is None:
        return "!" + str(arguments)
    try:
        return json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(arguments, str):  # whatever a model writes must not raise
            return "!" + arguments
        raise TokenError(f"tool call: expected JSON arguments, got {value!r:.80}: {error}") from error


def parse_arguments(arguments: object) -> object | None:
    """Return tool arguments as a JSON value; None if they are text that is not JSON (or the JSON null)."""
    return parse_json(arguments) if isinstance(arguments, str) else arguments


def _canonical(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in cast("Sequence[object]", value)]
    return value


def tools_key(tools: ToolSchemas | None) -> bytes:
    """Return 16 bytes, equal for equal tool lists (key order apart); empty for no tools; a `TokenError` for no JSON."""
    if not tools:
        return b""
    try:
        text = json.dumps(tools, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TokenError(f"tools: expected JSON schemas, got something else: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def plain_message(
    message: object, *, split_inline_thinking: bool, style: CallStyle, reasoning: str | None = None
) -> PlainMessage:
    """Return a message as chat templates expect it: plain JSON, tool arguments parsed, no `None` except as empty content.

    `split_inline_thinking` moves a leading `<think>` block of assistant text into `reasoning_content`; `style` says
    how the template takes tool calls. `reasoning` is used for an assistant message that has none itself.
    """
    role = role_of(message)
    get = field_getter(message)
    content = text_of(get("content"), f"{role} message")
    plain: PlainMessage = {"role": role, "content": content}
    if role == "assistant":
        carried = reasoning_of(message)
        if split_inline_thinking:
            plain["content"] = content = split_thinking(content).content
        elif split_thinking(content).reasoning is not None:
            carried = reasoning = None
        reasoning = reasoning if carried is None else carried
        if reasoning:
            plain["thinking"] = plain["reasoning_content"] = reasoning
        calls = calls_of(message)
        if calls:
            plain["content"] = content or style.no_text
            plain["tool_calls"] = [_plain_call(call, style.text_arguments) for call in calls]
    for name in ("tool_call_id", "name"):
        value = get(name)
        if isinstance(value, str):
            plain[name] = str.__str__(value)
    return plain


def _plain_call(call: ToolCallFields, text_arguments: bool) -> dict[str, object]:
    arguments = call.arguments
    if text_arguments:
        arguments = str.__str__(arguments) if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    else:
        value = parse_arguments(arguments)
        arguments = arguments if value is None else value
    plain: dict[str, object] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    if call.id is not None:
        plain["id"] = call.id
    return plain
