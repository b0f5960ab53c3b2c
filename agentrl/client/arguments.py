"""What `chat.completions.create` accepts, read once into plain sampling parameters.

Invariant: every argument is honoured, harmless to ignore (it names no property of the sampled tokens), or an error that
names it; none is dropped silently.

Sampling arguments: read, checked, and filled in with the run's defaults.

Invariant: what is returned is within the bounds every backend takes, so a wrong value never reaches a server.

What a workflow may pass as messages: a list, checked here, of messages, which the token graph checks as it reads them.

Invariant: no message is dropped, reordered or reworded, and what the caller passed is never modified.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import NoneType
from typing import Any, NoReturn, TypeAlias, TypedDict, cast

from openai import NotGiven, Omit, omit
from pydantic import BaseModel

from agentrl.client.config import SamplingConfig
from agentrl.errors import WorkflowError
from agentrl.inference.backend import SamplingParams
from agentrl.types import Message

WHERE = "model call"


def refuse(name: str, value: object, why: str) -> NoReturn:
    """Raise `WorkflowError` for a value that cannot be honoured."""
    raise WorkflowError(f"{WHERE}: {name}={short(value)} cannot be honoured: {why}")


def short(value: object) -> str:
    """Return a value as it stands in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def boolean(given: Mapping[str, object], name: str) -> bool:
    """Return whether `given` has True under that name; raise `WorkflowError` if it has something that is no bool."""
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return value is True
    raise WorkflowError(f"{WHERE}: {name} must be True or False, got {type(value).__name__} {short(value)}")


def read_sampling(given: Mapping[str, object], defaults: SamplingConfig, *, vocab_size: int) -> SamplingParams:
    """Return the sampling parameters of one call.

    Args:
        given: arguments by their OpenAI names, and top_k, min_p, ignore_eos, stop_token_ids; None means the default.
        defaults: of the run.
        vocab_size: ids are below it.

    Raises:
        WorkflowError: names the argument that is wrong.
    """
    given = {name: value for name, value in given.items() if value is not None}
    options = given.get("chat_template_kwargs")
    if options is not None and options != {} and options != defaults.template_options:
        why = f"the run renders with {defaults.template_options}; set `sampling.template_options`"
        refuse("chat_template_kwargs", options, why)
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    seed = given.get("seed")
    return SamplingParams(
        max_new_tokens=defaults.max_tokens if limit is None else _integer("max_tokens", limit, 1),
        temperature=_number(given, "temperature", defaults.temperature, 0.0, sys.float_info.max),
        top_p=_top_p(_number(given, "top_p", defaults.top_p, 0.0, 1.0)),
        top_k=_top_k(given.get("top_k", -1)),
        min_p=_number(given, "min_p", 0.0, 0.0, 1.0),
        frequency_penalty=_no_penalty(given, "frequency_penalty"),
        presence_penalty=_no_penalty(given, "presence_penalty"),
        stop=_stop_strings(given.get("stop", ())),
        stop_token_ids=_stop_ids(given.get("stop_token_ids", ()), vocab_size),
        ignore_eos=boolean(given, "ignore_eos"),
        seed=None if seed is None else _integer("seed", seed, -(2**63)),
    )


def _number(given: Mapping[str, object], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    bounds = f"at least {low:g}" if high == sys.float_info.max else f"between {low:g} and {high:g}"
    raise WorkflowError(f"{WHERE}: {name} must be a number {bounds}, got {type(value).__name__} {short(value)}")


def _integer(name: str, value: object, low: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63:
        return value
    raise WorkflowError(f"{WHERE}: {name} must be an integer in {low}..2**63-1, got {type(value).__name__} {short(value)}")


def _top_p(value: float) -> float:
    if value > 0:
        return value
    raise WorkflowError(f"{WHERE}: top_p must be greater than 0, got 0; temperature=0 is greedy")


def _top_k(value: object) -> int:
    if value == -1 or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31):
        return cast("int", value)
    raise WorkflowError(f"{WHERE}: top_k must be a positive integer below 2**31, or -1 for no limit, got {short(value)}")


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if isinstance(stops, Sequence):
        items = tuple(cast("Sequence[object]", stops))
        if all(isinstance(item, str) and item for item in items):
            return cast("tuple[str, ...]", items)
    raise WorkflowError(f"{WHERE}: stop must be a non-empty string or a list of them, got {short(value)}")


def _stop_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = tuple(cast("Sequence[object]", value))
        if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size for item in items):
            return cast("tuple[int, ...]", items)
    raise WorkflowError(f"{WHERE}: stop_token_ids must be a list of ids below {vocab_size}, got {short(value)}")


def _no_penalty(given: Mapping[str, object], name: str) -> float:
    value = _number(given, name, 0.0, -2.0, 2.0)
    if value != 0.0:
        refuse(name, value, "recorded log-probs would include it and the trainer's would not; leave it out")
    return 0.0


MessageLike: TypeAlias = Mapping[str, object] | BaseModel
"""A message as a mapping, or as the openai object a completion carries."""


def checked_messages(messages: Iterable[MessageLike]) -> list[Message]:
    """Return the messages as the token graph takes them: the same objects. The graph checks each as it reads it.

    Raises:
        WorkflowError: for an empty conversation, or something that is no list of messages.
    """
    if type(messages) is not list and (isinstance(messages, (str, Mapping, BaseModel)) or not hasattr(messages, "__iter__")):
        raise WorkflowError(f"messages must be a list of messages, got {type(messages).__name__} {messages!r:.80}")
    checked: list[Any] = [*messages]
    if not checked:
        raise WorkflowError("messages is empty; a model call needs at least one message")
    return checked


RAW_RESPONSE_HEADER = "X-Stainless-Raw-Response"


class CreateArguments(TypedDict, total=False):
    """Keyword arguments of `chat.completions.create` besides `messages` and `stream`; None means the default."""

    model: str
    """Echoed in the completion; the policy is the only model there is."""
    tools: Iterable[Mapping[str, object]] | None
    tool_choice: str | Mapping[str, object] | None
    """`auto`, or `none` (rendered without tools). A forced call cannot be honoured and is refused."""
    stop: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    """Nucleus mass. Recorded log-probs are of the untruncated distribution, so below 1 the behavior weights are biased."""
    max_tokens: int | None
    max_completion_tokens: int | None
    """Wins over `max_tokens`. Either is clipped to the room the context and the episode's token budget leave."""
    seed: int | None
    logprobs: bool | None
    """True: `choice.logprobs.content` has one entry for each sampled token."""
    top_logprobs: int | None
    n: int | None
    frequency_penalty: float | None
    presence_penalty: float | None
    stream_options: Mapping[str, object] | None
    response_format: Mapping[str, object] | None
    modalities: Sequence[str] | None
    timeout: float | object | None
    """Deadline of this call, seconds; an HTTP timeout object counts with its read timeout."""
    extra_body: Mapping[str, object] | None
    """top_k, min_p, ignore_eos, stop_token_ids, chat_template_kwargs, return_token_ids, or any sampling argument above.

    `top_k` and `min_p` (both off unless given) truncate the distribution as `top_p` does, with the same bias.
    """
    extra_headers: Mapping[str, object] | None
    extra_query: Mapping[str, object] | None
    parallel_tool_calls: bool | None
    """True. A limit of one call cannot be honoured, so False is refused."""
    user: str | None
    metadata: Mapping[str, str] | None
    store: bool | None
    service_tier: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    prompt_cache_options: Mapping[str, object] | None
    audio: object
    function_call: object
    functions: object
    logit_bias: Mapping[str, float] | None
    moderation: object
    prediction: object
    reasoning_effort: str | None
    verbosity: str | None
    web_search_options: object


_UNSERVED = {
    "audio": "the policy writes text only",
    "function_call": "functions are the API before tools; pass `tools`",
    "functions": "functions are the API before tools; pass `tools`",
    "logit_bias": "the recorded log-probs would not be the policy's",
    "moderation": "there is no moderation model",
    "prediction": "there is no predicted output",
    "reasoning_effort": "set the chat template's own switch in `sampling.template_options`",
    "verbosity": "the chat template has no such switch",
    "web_search_options": "tools run in the workflow; pass `tools`",
}
_NAMES = frozenset(CreateArguments.__annotations__)
_EXTRA_NAMES = frozenset({"top_k", "min_p", "ignore_eos", "stop_token_ids", "chat_template_kwargs", "return_token_ids"})
_NOT_IN_BODY = frozenset({"tools", "tool_choice", "timeout", "extra_body", "extra_headers", "extra_query"})
_BODY_NAMES = (_NAMES | _EXTRA_NAMES) - _NOT_IN_BODY
_FOREVER_S = 1e9
"""Longest timeout: an int may be too large for a float."""
_NOTHING = (NoneType, Omit, NotGiven)
_UNCHANGING = frozenset({str, bool, int, float, *_NOTHING})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """One call's arguments, read and checked."""

    sampling: SamplingParams
    """`max_new_tokens` as asked for, not yet clipped."""
    model: str
    tools: list[Mapping[str, object]] | None
    logprobs: bool
    return_prompt_ids: bool
    include_usage: bool
    timeout_s: float | None
    raw: bool
    """The call came through `with_raw_response`."""


def read_arguments(
    arguments: Mapping[str, object], defaults: SamplingConfig, *, default_timeout: object, vocab_size: int
) -> CallArguments:
    """Return the arguments of one call, checked, with the run's defaults filled in.

    Raises:
        TypeError: an argument the OpenAI API does not have; the message suggests the nearest one.
        WorkflowError: a value that is wrong, or a feature that cannot be honoured.
    """
    timeout = arguments.get("timeout", omit)
    given = {name: value for name, value in arguments.items() if not isinstance(value, _NOTHING)}
    if not given.keys() <= _NAMES:
        unknown = min(given.keys() - _NAMES)
        near = get_close_matches(unknown, _NAMES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        takes = ", ".join(sorted(_NAMES))
        raise TypeError(f"chat.completions.create() got an unexpected keyword argument {unknown!r}; {hint}it takes {takes}")
    if "extra_body" in given:
        given.update(_read_body(_mapping(given, "extra_body")))
    for name in _UNSERVED.keys() & given.keys():
        if given[name] not in ({}, []):
            refuse(name, given[name], _UNSERVED[name])
    _check_fixed(given)
    raw = _mapping(given, "extra_headers").get(RAW_RESPONSE_HEADER)
    if raw == "stream":
        raise WorkflowError(f"{WHERE}: with_streaming_response is not served; use stream=True or with_raw_response")
    return CallArguments(
        sampling=read_sampling(given, defaults, vocab_size=vocab_size),
        model=str(given.get("model", "policy")),
        tools=_read_tools(given.get("tools"), given.get("tool_choice", "auto")),
        logprobs=boolean(given, "logprobs"),
        return_prompt_ids=boolean(given, "return_token_ids"),
        include_usage=boolean(_mapping(given, "stream_options"), "include_usage"),
        timeout_s=_read_timeout(default_timeout if isinstance(timeout, (Omit, NotGiven)) else timeout),
        raw=raw is not None,
    )


def streams(stream: object) -> bool:
    """Return whether `stream` asks for a stream; None, and openai's ways to say nothing, do not.

    Raises:
        WorkflowError: it is neither a bool nor nothing.
    """
    return not isinstance(stream, _NOTHING) and boolean({"stream": stream}, "stream")


class ArgumentReader:
    """Reads the arguments of an episode's calls; a call with those of the last one costs a comparison."""

    def __init__(self, defaults: SamplingConfig, *, vocab_size: int) -> None:
        """Read with the run's defaults; see `read_arguments`."""
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._last: tuple[CallArguments, Mapping[str, object], Sequence[object], object] | None = None
        """The last call with its arguments, their names and types, and the default timeout, if none of them can change."""

    def read(self, arguments: Mapping[str, object], default_timeout: object) -> CallArguments:
        """Return the arguments of one call; see `read_arguments`."""
        tools = arguments.get("tools")
        if tools is not None:
            arguments = {name: value for name, value in arguments.items() if name != "tools"}
        kinds, last = [*arguments, *map(type, arguments.values())], self._last
        # names with types first: arguments of other types may equal anything, and 1 equals True
        if last is not None and kinds == last[2] and arguments == last[1] and default_timeout is last[3]:
            call = last[0]
        else:
            call = read_arguments(arguments, self._defaults, default_timeout=default_timeout, vocab_size=self._vocab_size)
            fixed = _UNCHANGING.issuperset(map(type, (*arguments.values(), default_timeout)))
            self._last = (call, dict(arguments), kinds, default_timeout) if fixed else None
        if tools is None or isinstance(tools, _NOTHING):
            return call
        choice = arguments.get("tool_choice")
        return replace(call, tools=_read_tools(tools, "auto" if isinstance(choice, _NOTHING) else choice))


def _mapping(given: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = given.get(name, {})
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value)
    raise WorkflowError(f"{WHERE}: {name} must be a mapping, got {type(value).__name__} {short(value)}")


def _read_body(body: Mapping[str, object]) -> dict[str, object]:
    extra = {str(name): value for name, value in body.items()}
    unknown = sorted(extra.keys() - _BODY_NAMES)
    if unknown:
        raise WorkflowError(
            f"{WHERE}: extra_body has {', '.join(unknown)}, which no backend here honours; "
            f"it may hold {', '.join(sorted(_EXTRA_NAMES))}, or a sampling argument"
        )
    return {name: value for name, value in extra.items() if value is not None}


def _check_fixed(given: Mapping[str, object]) -> None:
    """Refuse the values of otherwise known arguments that cannot be honoured."""
    if given.get("n", 1) != 1:
        refuse("n", given["n"], "one call is one turn; call it several times, in a task group if you like")
    if given.get("parallel_tool_calls", True) is not True:
        why = "decoding is unconstrained; leave it out, take the first call in the workflow and answer others with an error"
        refuse("parallel_tool_calls", given["parallel_tool_calls"], why)
    if given.get("top_logprobs"):
        refuse("top_logprobs", given["top_logprobs"], "only the sampled tokens' log-probs are returned; leave it out")
    form = given.get("response_format")
    if form is not None and not (isinstance(form, Mapping) and cast("Mapping[str, object]", form).get("type") == "text"):
        refuse("response_format", form, 'only {"type": "text"}; decoding is unconstrained, so parse the text yourself')
    if given.get("modalities", ["text"]) not in (["text"], ("text",)):
        refuse("modalities", given["modalities"], 'the policy writes text only; pass ["text"], or leave it out')


def _read_tools(tools: object, choice: object) -> list[Mapping[str, object]] | None:
    if choice not in ("auto", "none"):
        refuse("tool_choice", choice, "decoding is unconstrained, so no call can be forced; use 'auto' or 'none'")
    if tools is None:
        return None
    if not isinstance(tools, Iterable) or isinstance(tools, (str, Mapping)):
        raise WorkflowError(f"{WHERE}: tools must be a list of tool schemas, got {type(tools).__name__} {short(tools)}")
    schemas: list[Mapping[str, object]] = []
    for index, tool in enumerate(cast("Iterable[object]", tools)):
        function = cast("Mapping[str, object]", tool).get("function") if isinstance(tool, Mapping) else None
        name = cast("Mapping[str, object]", function).get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise WorkflowError(
                f'{WHERE}: tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, got {short(tool)}; '
                "a function decorated with @tool has it as `.schema`"
            )
        schemas.append(cast("Mapping[str, object]", tool))
    return schemas if schemas and choice == "auto" else None


def _read_timeout(value: object) -> float | None:
    if isinstance(value, _NOTHING):
        return None
    if hasattr(value, "read"):
        return _read_timeout(getattr(value, "read", None))
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise WorkflowError(f"{WHERE}: timeout must be a positive number of seconds, got {short(value)}")
    return float(min(value, _FOREVER_S))
