"""Chat completions as a dialect, in the shapes of OpenAI's API.

Invariant: an answer is what the client of a workflow returns for the same turn (`agentrl.client.completion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl.client.arguments import EXTRA_NAMES, CreateArguments
from agentrl.client.backend import Answer, Delta
from agentrl.client.completion import ChunkWriter, completion
from agentrl.servers.http.errors import openai_error
from agentrl.types import Message
from agentrl_doors.gateway.backend import SERVER_NAMES
from agentrl_doors.gateway.dialect import Caller, DialectCall
from agentrl_doors.gateway.dialects.answers import DONE, ChunkSigns, frame
from agentrl_doors.gateway.dialects.callers import chat_caller
from agentrl_doors.gateway.fields import Fields, check_tools, omitted_text, read_choices, read_object
from agentrl_doors.gateway.items import ItemStore
from agentrl_doors.gateway.refusals import CallRefused

Json = dict[str, Any]
_UNASKED: Final = frozenset({"reasoning_effort", "verbosity"})
"""Fields that programs send unasked to any model; a policy has no such setting."""
_OF_CLIENTS: Final = frozenset({"timeout", "extra_body", "extra_headers", "extra_query", "model"})
_ARGUMENTS: Final = frozenset(CreateArguments.__annotations__) - _OF_CLIENTS - _UNASKED


class ChatDialect:
    """`POST /v1/chat/completions`.

    A call of an episode is one turn. With `untrained` it may ask for several choices, and for the sampling arguments of
    `SERVER_NAMES`.
    """

    name = "chat"

    def __init__(self, *, untrained: bool = False) -> None:
        self._untrained = untrained

    def read(self, body: bytes, store: ItemStore | None, *, omit_media: bool = False) -> DialectCall:
        """Return a body as a call; the client checks arguments, and refuses those that nothing honours."""
        sent = read_object(body)
        fields = Fields(sent)
        messages, omitted = fields.need("messages", list), set[str]()
        if omit_media:
            messages = [_without_media(each, omitted) for each in cast("list[object]", messages)]
        check_tools(fields.read("tools", list) or [])
        model, stream = fields.read("model", str), fields.read("stream", bool) or False
        fields.skip(_ARGUMENTS | EXTRA_NAMES)
        arguments = {name: value for name, value in sent.items() if name in _ARGUMENTS}
        if not arguments.get("logprobs"):
            arguments.pop("top_logprobs", None)  # of log-probs that the call does not ask for
        extra = {name: value for name, value in sent.items() if name in EXTRA_NAMES}
        if extra:
            arguments["extra_body"] = extra
        n, server_sampling = self._read_untrained(fields, arguments)
        return DialectCall(
            model=model,
            messages=cast("list[Message]", messages),
            arguments=arguments,
            stream=stream,
            n=n,
            server_sampling=server_sampling,
            ignored=(*fields.unread, *sorted(omitted)),
            body=sent,
        )

    def _read_untrained(self, fields: Fields, arguments: dict[str, object]) -> tuple[int, Mapping[str, object]]:
        """Take the choices and the sampling arguments of `SERVER_NAMES` out of the arguments, and return them."""
        n = arguments.pop("n", 1)
        if not self._untrained:
            if n != 1:
                raise CallRefused(f"n={n!r:.40}: one call is one turn; call several times, or leave n out")
            return 1, {}
        found = {name: value for name in SERVER_NAMES if (value := fields.any(name)) is not None}
        for name in found:
            arguments.pop(name, None)
        return read_choices(fields), found

    def caller(self, call: DialectCall, headers: Mapping[str, str]) -> Caller:
        """Return who makes a call."""
        return chat_caller(call, headers)

    def answer(self, call: DialectCall, answer: Answer) -> Json:
        """Return a chat completion."""
        fields = completion(answer).model_dump(mode="json", exclude_unset=True)
        return _without_ids({**fields, "id": answer.id}, call)

    def events(self, call: DialectCall, answer_id: str) -> ChatEvents:
        """Return the writer of a chunked completion."""
        return ChatEvents(call, answer_id)

    def keep(self, call: DialectCall, answer: Answer, store: ItemStore) -> None:
        """Keep nothing: calls name no earlier ones."""

    def answer_id(self, response_id: str) -> str:
        """Return the id as it is."""
        return response_id

    def refusal(self, message: str, *, status: int, code: str | None = None) -> dict[str, object]:
        """Return an error in OpenAI's shape."""
        return openai_error(message, status=status, code=code)


def completion_of_choices(completions: Sequence[Json]) -> Json:
    """Return one completion with the choices of all."""
    choices = [{**each["choices"][0], "index": index} for index, each in enumerate(completions)]
    return {**completions[0], "choices": choices, "usage": _usage_of_choices([each["usage"] for each in completions])}


class ChatEvents(ChunkSigns):
    """The chunks of one choice as events; `end` is that of a stream with several choices."""

    def __init__(self, call: DialectCall, answer_id: str, choice: int = 0, end: _StreamEnd | None = None) -> None:
        options = call.body.get("stream_options")
        usage = bool(cast("Mapping[str, object]", options).get("include_usage")) if isinstance(options, Mapping) else False
        self._chunks = ChunkWriter(answer_id, call.model or "policy", include_usage=usage)
        self._call, self._choice, self._end = call, choice, end or _StreamEnd(1)

    def begin(self) -> Sequence[bytes]:
        """Return nothing: the role comes with the first text."""
        return []

    def push(self, delta: Delta) -> Sequence[bytes]:
        """Return the chunks of new text."""
        self._chunks.write(delta)
        return [frame(each) for each in self._taken()]

    def finish(self, answer: Answer) -> Sequence[bytes]:
        """Return tool calls and the end; after the last choice the usage, where the call asks for it, and the marker."""
        self._chunks.write_end(answer)
        chunks = self._taken()
        usages = [each for each in chunks if not each["choices"]]
        return [*(frame(each) for each in chunks if each["choices"]), *self._end.after(usages)]

    def _taken(self) -> list[Json]:
        chunks = [_without_ids(each.model_dump(mode="json", exclude_unset=True), self._call) for each in self._chunks.take()]
        for choice in (each for chunk in chunks for each in chunk["choices"]):
            choice["index"] = self._choice
        return chunks


def choice_events(call: DialectCall, answer_id: str) -> Sequence[ChatEvents]:
    """Return the writers of the choices of one stream."""
    end = _StreamEnd(call.n)
    return [ChatEvents(call, answer_id, choice, end) for choice in range(call.n)]


class _StreamEnd:
    """The end of a stream, after the last of its choices."""

    def __init__(self, choices: int) -> None:
        self._left = choices
        self._usages: list[Json] = []

    def after(self, usages: Sequence[Json]) -> list[bytes]:
        """Return the end if another choice, which has these chunks with its usage, is the last one."""
        self._left -= 1
        self._usages += usages
        if self._left:
            return []
        counts = [each["usage"] for each in self._usages]
        return [*(frame({**each, "usage": _usage_of_choices(counts)}) for each in self._usages[-1:]), DONE]


def _usage_of_choices(usages: Sequence[Mapping[str, Any]]) -> Json:
    """Return the usage of all choices: the prompt counts once, as at OpenAI."""
    first, *others = usages
    if not others:
        return dict(first)
    sampled = sum(each["completion_tokens"] for each in usages)
    return {**first, "completion_tokens": sampled, "total_tokens": first["prompt_tokens"] + sampled}


def _without_media(message: object, omitted: set[str]) -> object:
    """Return a message with a text in the place of each image and file; their types are added to `omitted`."""
    content = cast("Mapping[str, object]", message).get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    parts = list(cast("list[object]", content))
    for at, part in enumerate(parts):
        kind = cast("Mapping[str, object]", part).get("type") if isinstance(part, Mapping) else None
        text = omitted_text(kind) if isinstance(kind, str) else None
        if text is not None:
            omitted.add(f"messages[].{kind}")
            parts[at] = {"type": "text", "text": text}
    return {**cast("Mapping[str, object]", message), "content": parts}


def _without_ids(fields: Json, call: DialectCall) -> Json:
    """Return a completion or chunk without the ids of tokens, unless the call has `return_token_ids`."""
    if not call.body.get("return_token_ids"):
        for choice in fields["choices"]:
            choice.pop("token_ids", None)
    return fields
