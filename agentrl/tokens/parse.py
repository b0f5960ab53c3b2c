"""Splits the output of a model into content, reasoning and tool calls; the forms are in `agentrl.tokens.formats`.

Invariant: parsing never raises and never loses text. Text that is not a well-formed call stays in the content, and the
message is flagged `malformed`; otherwise the content is the decoded text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec

THINK_OPEN, THINK_CLOSE = _THINK = "<think>", "</think>"
_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call of the model."""

    id: str
    """Nine letters and digits, unique within an episode; in the form of the model's own ids where its template has one."""
    name: str
    arguments: str
    """JSON text of an object."""


class ParsedMessage(msgspec.Struct, frozen=True):
    r"""One model output as a message.

    Example:
        >>> parsed = parse_text("<think>\nadd\n</think>\n\nFour.", form=None, tools=None, thinking_open=False, salt="")
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
    """A tool call as the model wrote it."""

    name: str
    arguments: str
    """JSON text of an object."""
    id: str | None = None
    """The id that the model wrote, in formats whose templates need it; else None."""


class ParsedCalls(NamedTuple):
    """The result of a call reader."""

    content: str
    calls: list[RawCall]
    malformed: bool


class ReadCalls(NamedTuple):
    """Calls that stand next to each other, and where they end."""

    calls: list[RawCall]
    end: int


class ThinkingSplit(NamedTuple):
    """An output split at its reasoning."""

    reasoning: str | None
    rest: str
    malformed: bool
    """True when the reasoning does not end."""


Schemas = Sequence[Mapping[str, Any]] | None
"""The tools of a request, which give the types of arguments; None without any."""

CallReader = Callable[[str, Schemas], ParsedCalls]
"""Takes the text after the reasoning, and the tools; returns the calls and the remaining text."""


CallWriter = Callable[[Sequence[tuple[str, Mapping[str, object]]]], str]
"""Takes the names and arguments of calls; returns them as the model writes them."""


class ToolWriter(NamedTuple):
    """How tools are described to a model whose template has none, and how results are written for it."""

    description: str
    """The text in the system message; `{tools}` stands for the schemas, one JSON object a line."""
    result: tuple[str, str]
    """The texts around a tool's result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The form in which a family of models writes tool calls."""

    name: str
    """As `sampling.tool_format` names it."""
    openings: tuple[str, ...]
    """Texts that may begin a call anywhere in an answer; nothing from there on is streamed."""
    read: CallReader
    starts: tuple[str, ...] = ()
    """Texts at the start of an answer that may make all of it a call."""
    told: str = ""
    """Text of the prompt without which the form is not tried, where a template asks for calls in a form that it does
    not write itself."""
    thinking: tuple[str, str] | None = None
    """Texts between which the models reason, besides `<think>` and `</think>`."""
    split: Callable[[str], ThinkingSplit] | None = None
    """Splits an output at its reasoning, for formats in which the answer, too, stands between marks."""
    call_id: Callable[[str, int], str] | None = None
    """Returns the id of a call by its name and number, for templates that write ids in a form of their own."""
    write: CallWriter | None = None
    """Writes calls, for templates that leave them out; None if the format is only read."""
    sign: str = ""
    """Text by which the prompt of such a template asks for the form."""
    writer: ToolWriter | None = None
    """For templates without tools; needs `write`."""


class CallLimits(NamedTuple):
    """What a template can render beside, or as, tool calls; an answer beyond that is text."""

    max_calls: int | None = None
    """Calls in one message; None without a limit."""
    with_text: bool = True
    with_reasoning_and_text: bool = True


def parse_text(
    text: str,
    *,
    form: ToolFormat | None,
    tools: Schemas,
    thinking_open: bool,
    salt: object,
    limits: CallLimits = CallLimits(),  # noqa: B008 - an immutable tuple
) -> ParsedMessage:
    """Return decoded model output, without its end-of-turn token and stop string, as a message.

    `form` is that of the model's tool calls, which are read only if the request had `tools`; `thinking_open` says whether
    the prompt ended inside `<think>`; `salt` makes the ids of the calls unique; `limits` are those of the template.
    """
    if form is not None and form.split is not None:
        reasoning, content, malformed = form.split(text)
    else:
        reasoning, content, malformed = _split_reasoning(text, thinking_open, form)
    if form is None or malformed or not (tools or form.split):
        return ParsedMessage(content, reasoning, (), malformed)
    parsed = form.read(content, tools)
    if parsed.calls and not _renderable(parsed, reasoning, limits):
        return ParsedMessage(content, reasoning, (), True)
    return ParsedMessage(
        content=parsed.content,
        reasoning=reasoning,
        tool_calls=tuple(
            ToolCall(id=call.id or _call_id(salt, at), name=call.name, arguments=call.arguments)
            for at, call in enumerate(parsed.calls)
        ),
        malformed=parsed.malformed,
    )


def _renderable(parsed: ParsedCalls, reasoning: str | None, limits: CallLimits) -> bool:
    if limits.max_calls is not None and len(parsed.calls) > limits.max_calls:
        return False
    return not parsed.content or (limits.with_text and (reasoning is None or limits.with_reasoning_and_text))


def _split_reasoning(text: str, thinking_open: bool, form: ToolFormat | None) -> ThinkingSplit:
    start = text.lstrip()
    opening, closing = next((tags for tags in thinking_tags(form) if start.startswith(tags[0])), _THINK)
    if not thinking_open and not start.startswith(opening):
        return ThinkingSplit(None, text, False)
    body = start.removeprefix(opening)
    reasoning, closed, content = body.partition(closing)
    reasoning = reasoning.strip("\n") or None
    if not closed:
        return ThinkingSplit(reasoning, "", True)
    return ThinkingSplit(reasoning, content.lstrip("\n"), False)


def thinking_tags(form: ToolFormat | None) -> Sequence[tuple[str, str]]:
    """Return the texts between which a model may reason at the start of an output."""
    return [_THINK] if form is None or form.thinking is None else [_THINK, form.thinking]


def _call_id(salt: object, at: int) -> str:
    number = int.from_bytes(hashlib.blake2b(f"{salt}/{at}".encode(), digest_size=8).digest(), "big")
    letters: list[str] = []
    for _ in range(9):
        number, digit = divmod(number, len(_ID_ALPHABET))
        letters.append(_ID_ALPHABET[digit])
    return "".join(letters)


def read_blocks(
    text: str, tools: Schemas, *, opening: str, closing: str, decode: Callable[[str, int, Schemas], ReadCalls | None]
) -> ParsedCalls:
    """Read blocks of calls; `decode` gets the place after an opening, and returns the calls there.

    A block ends with `closing`, which may be missing at the end of the text. What cannot be read stays in the content.
    """
    kept: list[str] = []
    calls: list[RawCall] = []
    malformed, at = False, 0
    while (start := text.find(opening, at)) >= 0:
        inside = start + len(opening)
        found = decode(text, inside, tools)
        end = None if found is None or not found.calls else _end_of_block(text, found.end, closing)
        if found is None or end is None:
            malformed, end = True, inside
            kept.append(text[at:end])
        else:
            kept.append(text[at:start])
            calls += found.calls
        at = end
    kept.append(text[at:])
    content = "".join(kept)
    return ParsedCalls(content.strip() if calls else content, calls, malformed)


def _end_of_block(text: str, at: int, closing: str) -> int | None:
    end = skip_space(text, at)
    if text.startswith(closing, end):
        return end + len(closing)
    return end if end == len(text) else None


def skip_space(text: str, at: int, space: str = " \n\t\r") -> int:
    """Return where the white space at `at` ends."""
    while at < len(text) and text[at] in space:
        at += 1
    return at


def json_call(text: str, at: int, tools: Schemas) -> ReadCalls | None:
    """Read one call, `{"name": ..., "arguments": {...}}`, in white space."""
    value_and_end = json_at(text, skip_space(text, at))
    call = None if value_and_end is None else call_of(value_and_end[0])
    return None if value_and_end is None or call is None else ReadCalls([call], value_and_end[1])


def json_calls(
    text: str, at: int, tools: Schemas, *, read_one: Callable[[object], RawCall | None] | None = None
) -> ReadCalls | None:
    """Read a list of such calls, or of calls that `read_one` takes from JSON values."""
    value_and_end = json_at(text, skip_space(text, at))
    if value_and_end is None or not isinstance(value_and_end[0], list):
        return None
    calls = [(read_one or call_of)(value) for value in cast("list[object]", value_and_end[0])]
    good = [call for call in calls if call is not None]
    return ReadCalls(good, value_and_end[1]) if good and len(good) == len(calls) else None


def json_at(text: str, at: int) -> tuple[object, int] | None:
    """Return the JSON value that begins at `at` and where it ends; None if there is none."""
    try:
        return _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def parse_json(text: str) -> object | None:
    """Return the JSON value of `text`; None if it is not JSON (or the JSON null)."""
    try:
        return cast("object", json.loads(text, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def call_of(value: object) -> RawCall | None:
    """Return the call of a JSON object with `name` and `arguments` or `parameters`; None if it is none."""
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, object]", value)
    if isinstance(fields.get("function"), dict):
        fields = cast("dict[str, object]", fields["function"])
    keys = [key for key in ("arguments", "parameters") if key in fields]
    if len(keys) != 1:
        return None
    return make_call(fields.get("name"), fields[keys[0]])


def make_call(name: object, arguments: object, call_id: str | None = None) -> RawCall | None:
    """Return a call with the arguments as JSON text; None for a name or arguments that are none."""
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):  # some models write the object as a JSON string
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        name.encode()
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):  # an infinite number, or half a character, which no template can render
        return None
    return RawCall(name, text, call_id)
