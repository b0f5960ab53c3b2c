"""Reading of bodies: typed fields, limits, and the names and counts of unread fields.

Invariant: a body that is no JSON object, is nested too deeply or has a field of the wrong type raises `CallRefused`, whose
message names the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Final, TypeVar, cast

from agentrl.servers.http.errors import decode_body, json_bytes
from agentrl_doors.gateway.refusals import CallRefused

MAX_NESTING = 64
"""Deepest nesting of a body; templates and schemas are read by functions that call themselves."""
MAX_TOOLS = 1024
"""Most tools of one call."""
MAX_TOOLS_BYTES = 512 * 1024
"""Largest tools of one call, as JSON."""
MAX_CHOICES = 128
"""Most choices of one call for each prompt."""
MAX_IGNORED: Final = 64
"""Fields without effect that are counted by name."""
_MAX_FIELD_NAME: Final = 100
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "container_upload"), "file"),
    "document": "document",
}
"""What the parts of a message that are no text hold, by their types in any dialect."""
_KINDS = {"str": "text", "list": "a list", "dict": "an object", "bool": "true or false"}
_T = TypeVar("_T")


def read_object(body: bytes) -> dict[str, object]:
    """Return the fields of a body that are not null.

    Raises:
        CallRefused: the body is no JSON object, or is nested more deeply than `MAX_NESTING`.

    Example:
        >>> read_object(b'{"model": "m", "user": null}')
        {'model': 'm'}
    """
    fields = decode_body(body, dict[str, object])
    if is_nested_deeper(fields, MAX_NESTING):
        raise CallRefused(f"the body is nested more than {MAX_NESTING} levels deep; send a flatter one")
    return {name: value for name, value in fields.items() if value is not None}


def is_nested_deeper(value: object, levels: int) -> bool:
    """Return whether objects and lists are nested more deeply than `levels`.

    Example:
        >>> is_nested_deeper({"a": []}, 2), is_nested_deeper({"a": []}, 1)
        (False, True)
    """
    level: list[object] = [value] if type(value) in (dict, list) else []
    for _ in range(levels):
        level = [child for node in level for child in _children(node) if type(child) in (dict, list)]
    return bool(level)


def _children(node: object) -> Iterable[object]:
    return cast("dict[str, object]", node).values() if type(node) is dict else cast("list[object]", node)


class Fields:
    """The fields of one object; remembers which were read.

    Args:
        values: the object.
        where: its place in the body, for messages: "" is the body itself.

    Example:
        >>> fields = Fields({"model": "m", "speed": "fast"})
        >>> fields.read("model", str), fields.unread
        ('m', ('speed',))
    """

    def __init__(self, values: object, where: str = "") -> None:
        if not isinstance(values, Mapping):
            raise CallRefused(f"{where} must be an object, got {type(values).__name__} {values!r:.80}")
        self._values = cast("Mapping[str, object]", values)
        self._where = where
        self._read: set[str] = set()

    def place(self, name: str) -> str:
        """Return where a field is, for messages."""
        return f"{self._where}.{name}" if self._where else name

    def read(self, name: str, kind: type[_T]) -> _T | None:
        """Return a field; None if it is missing or null. Raises `CallRefused` if it is of another type."""
        self._read.add(name)
        value = self._values.get(name)
        if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        named = _KINDS.get(kind.__name__, kind.__name__)
        raise CallRefused(f"{self.place(name)} must be {named}, got {type(value).__name__} {value!r:.80}")

    def need(self, name: str, kind: type[_T]) -> _T:
        """Return a field; raises `CallRefused` if it is missing, null, or of another type."""
        value = self.read(name, kind)
        if value is None:
            raise CallRefused(f"{self.place(name)} is missing")
        return value

    def any(self, name: str) -> object:
        """Return a field of any type; None if it is missing."""
        self._read.add(name)
        return self._values.get(name)

    def skip(self, names: Iterable[str]) -> None:
        """Count fields as read, which say nothing that an answer depends on."""
        self._read.update(names)

    @property
    def unread(self) -> tuple[str, ...]:
        """The places of the fields that were not read and are not null."""
        return tuple(
            sorted(self.place(name) for name, value in self._values.items() if value is not None and name not in self._read)
        )


class IgnoredFields:
    """Counts requests by the fields in them that have no effect: each counts, by name or as `other`.

    So a client cannot fill the counts with names of its own.

    Args:
        counts: grows by one name a field.
        prefix: of these names.

    Example:
        >>> counts: dict[str, float] = {}
        >>> IgnoredFields(counts, "ignored.").count(["speed", "speed"])
        >>> counts
        {'ignored.speed': 2.0}
    """

    def __init__(self, counts: MutableMapping[str, float], prefix: str = "") -> None:
        self._counts, self._prefix = counts, prefix
        self._known: set[str] = set()

    def count(self, fields: Iterable[str]) -> None:
        """Count the fields of one request."""
        for field in fields:
            is_known = field in self._known or len(self._known) < MAX_IGNORED
            if is_known:
                self._known.add(field)
            name = self._prefix + (field if is_known else "other")[:_MAX_FIELD_NAME]
            self._counts[name] = self._counts.get(name, 0.0) + 1.0


def read_choices(fields: Fields) -> int:
    """Return the choices that a call asks for, `n`; 1 where it does not say."""
    n = fields.any("n")
    if n is None:
        return 1
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise CallRefused(f"n must be an integer in 1..{MAX_CHOICES}, got {n!r:.80}")
    return n


def check_model(named: str | None, served: str) -> None:
    """Raise `CallRefused` (404) where a call names another model than the one that is served."""
    if named not in (None, served):
        raise CallRefused(
            f"there is no model {named!r:.80} here; this server has {served!r}: send that name, or leave `model` out",
            status=404,
            code="model_not_found",
        )


def check_tools(tools: Sequence[object]) -> None:
    """Raise `CallRefused` for more tools than a prompt can hold."""
    if len(tools) > MAX_TOOLS:
        raise CallRefused(f"the call has {len(tools)} tools; at most {MAX_TOOLS} are served: send fewer")
    size = len(json_bytes(tools))
    if size > MAX_TOOLS_BYTES:
        raise CallRefused(
            f"the tools of the call are {size} bytes of JSON; at most {MAX_TOOLS_BYTES} are served: shorten them"
        )


def function_tool(name: str, description: str | None, parameters: object) -> dict[str, object]:
    """Return a tool of chat completions, whose keys have one order whatever the client's is."""
    function: dict[str, object] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def tool_call(call_id: str | None, name: str, arguments: str) -> dict[str, object]:
    """Return a tool call of an assistant's message."""
    call: dict[str, object] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def argument_json(value: object) -> str:
    """Return a value as JSON text, as tool arguments are written."""
    return json.dumps(value, ensure_ascii=False)


def omitted_text(kind: str) -> str | None:
    """Return the text in the place of an image or a file that is omitted; None for parts of other types.

    Example:
        >>> omitted_text("input_image"), omitted_text("text")
        ('[image omitted]', None)
    """
    return f"[{_MEDIA[kind]} omitted]" if kind in _MEDIA else None


def text_in_place(where: str, kind: str, *, omit_media: bool) -> str:
    """Return the text in the place of a part that the policy cannot read.

    Raises:
        CallRefused: such parts are not omitted, or this one is neither an image nor a file.
    """
    text = omitted_text(kind) if omit_media else None
    if text is not None:
        return text
    remedy = ", or open the door with `images: omit`" if kind in _MEDIA and not omit_media else ""
    raise CallRefused(
        f"{where} is of type {kind!r:.80}: the policy reads text only; send text in its place{remedy}",
        code="unsupported_input",
    )
