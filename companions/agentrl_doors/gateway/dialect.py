"""The seam of the gateway: a dialect translates the bodies of one API into model calls, and answers back.

Invariant: a dialect holds no state and knows neither episodes nor engines. Each field of a body is read, refused by name, or
named in `DialectCall.ignored`; none is dropped silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from agentrl.client.backend import Answer, Delta
from agentrl.types import Message
from agentrl_doors.gateway.items import ItemStore


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectCall:
    """The body of one call, translated."""

    model: str | None
    """The name in the body; None if it names no model."""
    messages: list[Message]
    """The whole conversation, items of earlier responses included."""
    arguments: Mapping[str, object]
    """Of `chat.completions.create`, without `messages`, `model` and `stream`; the client checks their values."""
    stream: bool
    n: int = 1
    """Choices that the call asks for; only chat completions of a server that trains nothing have several."""
    server_sampling: Mapping[str, object] = field(default_factory=dict[str, object])
    """Sampling arguments of `SERVER_NAMES`, which such a server honours."""
    ignored: tuple[str, ...] = ()
    """Fields that have no effect, by name, such as `reasoning.effort` or `tools[].web_search`."""
    body: Mapping[str, object]
    """The body as it was sent, which the answer is written for."""


class Caller(NamedTuple):
    """The agent that makes a call, by the marks of its program."""

    client: str = ""
    """The program, as it names itself."""
    role: str = ""
    """Empty for its main agent, and where it does not say."""
    agent: str = ""
    """The mark that tells agents of one role apart, such as the id of a sub-agent."""


class EventWriter(Protocol):
    """Writes one answer as server-sent events. Each method returns the frames to send at once, perhaps none."""

    def begin(self) -> Sequence[bytes]:
        """Return the frames before the first piece."""
        ...

    def push(self, delta: Delta) -> Sequence[bytes]:
        """Return the frames of new text."""
        ...

    def finish(self, answer: Answer) -> Sequence[bytes]:
        """Return the last frames, tool calls included."""
        ...

    def sign(self) -> bytes:
        """Return what says in a long silence that the call runs; it changes nothing."""
        ...

    def fail(self, message: str, *, status: int, code: str | None = None) -> Sequence[bytes]:
        """Return the frames that end a stream with an error."""
        ...


class Dialect(Protocol):
    """One API."""

    @property
    def name(self) -> str:
        """The name in records and counts: `chat`, `responses` or `messages`."""
        ...

    def read(self, body: bytes, store: ItemStore | None, *, omit_media: bool = False) -> DialectCall:
        """Return a body as a call; `store` is None where nothing is kept between calls.

        With `omit_media` a short text takes the place of each image and file, whose type counts among the ignored fields.

        Raises:
            CallRefused: the body is no JSON object, or asks for what this server cannot do.
        """
        ...

    def caller(self, call: DialectCall, headers: Mapping[str, str]) -> Caller:
        """Return who makes a call, by the marks of the programs that speak this dialect; `headers` ignore case."""
        ...

    def answer(self, call: DialectCall, answer: Answer) -> dict[str, object]:
        """Return the body of the response, and fix its ids: the same answer always gets the same ones."""
        ...

    def events(self, call: DialectCall, answer_id: str) -> EventWriter:
        """Return the writer of a streamed response to a call, for the answer with this id (`AnswerStream.id`)."""
        ...

    def keep(self, call: DialectCall, answer: Answer, store: ItemStore) -> None:
        """Keep an answered call for later ones that name it by id, if the dialect has such names."""
        ...

    def answer_id(self, response_id: str) -> str:
        """Return the `Answer.id` that a response id of this dialect stands for; another dialect's id as it is."""
        ...

    def refusal(self, message: str, *, status: int, code: str | None = None) -> dict[str, object]:
        """Return the body of an error; `code` is OpenAI's name of the reason, such as `context_length_exceeded`."""
        ...
