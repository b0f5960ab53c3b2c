"""Chat completions as a dialect: one choice a call, in the shapes of OpenAI's API.

Invariant: an answer is what the client of a workflow returns for the same turn (`agentrl.client.completion`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, cast

from agentrl.client.arguments import EXTRA_NAMES, CreateArguments
from agentrl.client.backend import Answer, Delta
from agentrl.client.completion import ChunkWriter, completion
from agentrl.servers.http.errors import openai_error
from agentrl.types import Message
from agentrl_doors.gateway.body import UNASKED, CallRefused
from agentrl_doors.gateway.dialect import Caller, DialectCall
from agentrl_doors.gateway.dialects.answers import frame
from agentrl_doors.gateway.dialects.callers import chat_caller
from agentrl_doors.gateway.event_stream import COMMENT
from agentrl_doors.gateway.fields import Fields, check_tools, omitted_text, read_object
from agentrl_doors.gateway.items import ItemStore

_OF_CLIENTS: Final = frozenset({"timeout", "extra_body", "extra_headers", "extra_query", "model"})
_ARGUMENTS: Final = frozenset(CreateArguments.__annotations__) - _OF_CLIENTS - UNASKED


class ChatDialect:
    """`POST /v1/chat/completions`."""

    name = "chat"

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
        if arguments.pop("n", 1) != 1:
            raise CallRefused(f"n={sent['n']!r:.40}: one call is one turn; call several times, or leave n out")
        return DialectCall(
            model=model,
            messages=cast("list[Message]", messages),
            arguments=arguments,
            stream=stream,
            ignored=(*fields.unread, *sorted(omitted)),
            body=sent,
        )

    def caller(self, call: DialectCall, headers: Mapping[str, str]) -> Caller:
        """Return who makes a call."""
        return chat_caller(call, headers)

    def answer(self, call: DialectCall, answer: Answer) -> dict[str, object]:
        """Return a chat completion."""
        return _without_ids({**completion(answer).model_dump(mode="json", exclude_unset=True), "id": answer.id}, call)

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


class ChatEvents:
    """The chunks of one completion as events."""

    def __init__(self, call: DialectCall, answer_id: str) -> None:
        options = call.body.get("stream_options")
        usage = bool(cast("Mapping[str, object]", options).get("include_usage")) if isinstance(options, Mapping) else False
        self._chunks = ChunkWriter(answer_id, call.model or "policy", include_usage=usage)
        self._call = call

    def begin(self) -> Sequence[bytes]:
        """Return the chunk with the role."""
        return self._frames()

    def push(self, delta: Delta) -> Sequence[bytes]:
        """Return the chunks of new text."""
        self._chunks.write(delta)
        return self._frames()

    def finish(self, answer: Answer) -> Sequence[bytes]:
        """Return tool calls, the end, the usage where the call asks for it, and the marker of the end."""
        self._chunks.write_end(answer)
        return [*self._frames(), b"data: [DONE]\n\n"]

    def sign(self) -> bytes:
        """Return a comment."""
        return COMMENT

    def fail(self, message: str, *, status: int, code: str | None = None) -> Sequence[bytes]:
        """Return an event with the error."""
        return [frame(openai_error(message, status=status, code=code))]

    def _frames(self) -> list[bytes]:
        chunks = [chunk.model_dump(mode="json", exclude_unset=True) for chunk in self._chunks.take()]
        return [frame(_without_ids(chunk, self._call)) for chunk in chunks]


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


def _without_ids(fields: dict[str, object], call: DialectCall) -> dict[str, object]:
    """Return a completion or chunk without the ids of tokens, unless the call has `return_token_ids`."""
    if not call.body.get("return_token_ids"):
        for choice in cast("list[dict[str, object]]", fields["choices"]):
            choice.pop("token_ids", None)
    return fields
