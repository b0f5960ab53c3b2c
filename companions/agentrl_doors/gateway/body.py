"""The body of a call of the OpenAI API, split into what the gateway itself reads and what the client's code reads.

Invariant: every field is read, refused by name, or named in `OpenAICall.ignored`; none is dropped
silently. Every `AgentRLError` that a call can raise has a status, which an openai client turns into the right exception:

- 400: a wrong argument, messages that cannot be rendered, or a conversation that leaves no room (`context_length_exceeded`)
- 404: a model that is not served (`model_not_found`)
- 429: more calls wait than the server holds
- 503: the engine aborted the call, as at a weight update that ends all requests; 504: it took too long; 500: anything else
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentrl.client.arguments import EXTRA_NAMES, CreateArguments
from agentrl.errors import (
    AgentRLError,
    EpisodeLimit,
    RequestRejected,
    ServerTimeout,
    ServerUnavailable,
    TokenError,
    WorkflowError,
)
from agentrl.servers.http.errors import decode_body
from agentrl_doors.gateway.backend import SERVER_NAMES

MAX_CHOICES = 128
"""Most choices of one call for each prompt."""
UNASKED = frozenset({"reasoning_effort", "verbosity"})
"""Fields that programs send unasked to any model; a policy has no such setting."""
_NOT_IN_BODY = frozenset({"timeout", "extra_body", "extra_headers", "extra_query"})
_ARGUMENTS = frozenset(CreateArguments.__annotations__) - _NOT_IN_BODY - UNASKED
CHAT_FIELDS = _ARGUMENTS | EXTRA_NAMES | {"messages"}
"""Fields of a chat call that have an effect or are refused."""


class CallRefused(RequestRejected):
    """A call that is refused before anything is sampled, with OpenAI's code for the reason."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, retry_after_s: int = 1) -> None:
        """`retry_after_s` is when a call that is refused with 429 or 503 may be made again."""
        super().__init__(message, status=status)
        self.code = code
        self.retry_after_s = retry_after_s


def status_of(error: AgentRLError) -> int:
    """Return the HTTP status of an error.

    Example:
        >>> status_of(WorkflowError("n must be at least 1")), status_of(ServerUnavailable("aborted"))
        (400, 503)
    """
    if isinstance(error, RequestRejected):
        return error.status or 400
    if isinstance(error, (WorkflowError, TokenError, EpisodeLimit)):
        return 400
    if isinstance(error, ServerTimeout):
        return 504
    return 503 if isinstance(error, ServerUnavailable) else 500


def code_of(error: AgentRLError) -> str | None:
    """Return OpenAI's code for the reason of an error; None where it has none."""
    if isinstance(error, EpisodeLimit):
        return "context_length_exceeded"
    return error.code if isinstance(error, CallRefused) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAICall:
    """The fields of a call that both kinds of completions have."""

    model: str
    stream: bool
    n: int
    """Choices for each prompt."""
    include_usage: bool
    """Send the usage of a stream as its last event."""
    server_sampling: Mapping[str, object]
    """Sampling arguments of `SERVER_NAMES`."""
    rest: Mapping[str, object]
    """All other fields that are not null, and have an effect or are refused."""
    ignored: tuple[str, ...]
    """Fields that have no effect, by name."""

    def arguments(self) -> dict[str, Any]:
        """Return `rest` as arguments of the client's `chat.completions.create`; it checks their values."""
        found: dict[str, Any] = {name: value for name, value in self.rest.items() if name in _ARGUMENTS}
        extra = {name: value for name, value in self.rest.items() if name in EXTRA_NAMES}
        return {**found, "extra_body": extra} if extra else found


def read_openai_call(body: bytes, served: str, known: Collection[str] = CHAT_FIELDS) -> OpenAICall:
    """Return the body of a call; one without a model's name means `served`. Fields beyond `known` are ignored.

    Raises:
        CallRefused: another model is named, or `stream`, `n` or `stream_options` is wrong.
    """
    sent = {name: value for name, value in decode_body(body, dict[str, object]).items() if value is not None}
    if not sent.get("logprobs"):
        sent.pop("top_logprobs", None)  # of log-probs that the call does not ask for
    model, stream, n = sent.pop("model", served), sent.pop("stream", False), sent.pop("n", 1)
    if model != served:
        raise CallRefused(
            f"there is no model {model!r} here; this server has {served!r}: send that name, or leave `model` out",
            status=404,
            code="model_not_found",
        )
    if not isinstance(stream, bool):
        raise CallRefused(f"stream must be true or false, got {stream!r:.80}")
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_CHOICES:
        raise CallRefused(f"n must be an integer in 1..{MAX_CHOICES}, got {n!r:.80}")
    options = sent.pop("stream_options", {})
    usage = cast("Mapping[str, object]", options).get("include_usage", False) if isinstance(options, Mapping) else None
    if not isinstance(usage, bool):
        raise CallRefused(f"stream_options must be an object whose include_usage is true or false, got {options!r:.80}")
    extra = {name: sent.pop(name) for name in SERVER_NAMES if name in sent}
    rest = {name: value for name, value in sent.items() if name in known}
    return OpenAICall(
        model=served,
        stream=stream,
        n=n,
        include_usage=usage,
        server_sampling=extra,
        rest=rest,
        ignored=tuple(sorted(sent.keys() - rest.keys())),
    )


def with_seed(arguments: Mapping[str, Any], choice: int) -> dict[str, Any]:
    """Return the arguments for one choice: each has a seed of its own, counted up from that of the call."""
    seed = arguments.get("seed")
    if not choice or isinstance(seed, bool) or not isinstance(seed, int):
        return dict(arguments)
    return {**arguments, "seed": seed + choice}
