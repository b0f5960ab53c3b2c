"""The arguments of `chat.completions.create`, read once a call into plain sampling parameters.

Invariant: every argument is honoured, harmless to ignore (it changes nothing about the sampled tokens), or an error that
names it; none is dropped silently. The sampling parameters are within the bounds that every backend accepts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, NoReturn, TypeAlias, TypedDict, cast

from openai import NotGiven, Omit, omit
from pydantic import BaseModel

from agentrl.client.config import SamplingConfig
from agentrl.client.demand import Demand, read_demand
from agentrl.errors import WorkflowError
from agentrl.inference.backend import MAX_TEMPERATURE, TEMPERATURE_RULE, SamplingParams, is_temperature
from agentrl.types import Message

MessageLike: TypeAlias = Mapping[str, object] | BaseModel
"""A message as a mapping, or as the openai object a completion carries."""
RAW_RESPONSE_HEADER = "X-Stainless-Raw-Response"


class CreateArguments(TypedDict, total=False):
    """Keyword arguments of `chat.completions.create` besides `messages` and `stream`; None means the default."""

    model: str
    """Echoed in the completion; the policy is the only model there is."""
    tools: Iterable[Mapping[str, object]] | None
    tool_choice: str | Mapping[str, object] | None
    """`auto`, or `none` (rendered without tools). A forced call is as `sampling.unsupported` says."""
    stop: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    """Nucleus mass. Recorded log-probs are of the untruncated distribution, so below 1 the behavior weights are biased."""
    max_tokens: int | None
    max_completion_tokens: int | None
    """Takes precedence over `max_tokens`. Either is lowered to what the context and the episode's token budget leave."""
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
    """Deadline of this call, seconds; of an HTTP timeout object, its read timeout."""
    extra_body: Mapping[str, object] | None
    """top_k, min_p, ignore_eos, stop_token_ids, chat_template_kwargs, return_token_ids, or any sampling argument above.

    `top_k` and `min_p` (both off unless given) truncate the distribution as `top_p` does, with the same bias.
    """
    extra_headers: Mapping[str, object] | None
    extra_query: Mapping[str, object] | None
    parallel_tool_calls: bool | None
    """True; False is as `sampling.unsupported` says."""
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
EXTRA_NAMES = frozenset({"top_k", "min_p", "ignore_eos", "stop_token_ids", "chat_template_kwargs", "return_token_ids"})
_NOT_IN_BODY = frozenset({"tools", "tool_choice", "timeout", "extra_body", "extra_headers", "extra_query"})
_BODY_NAMES = (_NAMES | EXTRA_NAMES) - _NOT_IN_BODY
_FOREVER_S = 1e9
"""Seconds of the longest timeout: an int may be too large for a float."""
_NOT_GIVEN = (NoneType, Omit, NotGiven)
_WHERE = "model call"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """The arguments of a call, read and checked."""

    sampling: SamplingParams
    """`max_new_tokens` as the call asks for it; `Episode.request` lowers it."""
    model: str
    tools: list[Mapping[str, object]] | None
    demand: Demand | None
    """The demand put into the prompt, because decoding cannot enforce it; None if there is none."""
    logprobs: bool
    return_prompt_ids: bool
    include_usage: bool
    timeout_s: float | None


def read_arguments(
    arguments: Mapping[str, object],
    defaults: SamplingConfig,
    *,
    default_timeout: object,
    vocab_size: int,
    by_prompt: bool = False,
) -> CallArguments:
    """Return the arguments of one call, checked, with the run's defaults filled in.

    With `by_prompt`, what decoding cannot enforce is asked for in the prompt instead of being refused.

    Raises:
        TypeError: an argument the OpenAI API does not have; the message suggests the nearest one.
        WorkflowError: a value that is wrong, or a feature that cannot be honoured.
    """
    timeout = arguments.get("timeout", omit)
    given = {name: value for name, value in arguments.items() if not isinstance(value, _NOT_GIVEN)}
    if not given.keys() <= _NAMES:
        unknown = min(given.keys() - _NAMES)
        near = get_close_matches(unknown, _NAMES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        takes = ", ".join(sorted(_NAMES))
        raise TypeError(f"chat.completions.create() got an unexpected keyword argument {unknown!r}; {hint}it takes {takes}")
    if "extra_body" in given:
        given.update(_read_body(_mapping_argument(given, "extra_body")))
    for name in _UNSERVED.keys() & given.keys():
        if given[name] not in ({}, []):
            _refuse_argument(name, given[name], _UNSERVED[name])
    _check_fixed(given)
    if not by_prompt:
        _refuse_constraints(given)
    _read_bool(given, "parallel_tool_calls")
    tools = _read_tools(given.get("tools"))
    if given.get("tool_choice") == "none":
        tools = None
    if _mapping_argument(given, "extra_headers").get(RAW_RESPONSE_HEADER) == "stream":
        raise WorkflowError(f"{_WHERE}: with_streaming_response is not served; use stream=True or with_raw_response")
    return CallArguments(
        sampling=read_sampling(given, defaults, vocab_size=vocab_size),
        model=str(given.get("model", "policy")),
        tools=tools,
        demand=read_demand(given, tools) if by_prompt else None,
        logprobs=_read_bool(given, "logprobs"),
        return_prompt_ids=_read_bool(given, "return_token_ids"),
        include_usage=_read_bool(_mapping_argument(given, "stream_options"), "include_usage"),
        timeout_s=_read_timeout(default_timeout if isinstance(timeout, (Omit, NotGiven)) else timeout),
    )


def wants_stream(stream: object) -> bool:
    """Return whether `stream` asks for a stream; None and openai's values for "not given" do not."""
    return not isinstance(stream, _NOT_GIVEN) and _read_bool({"stream": stream}, "stream")


def checked_messages(messages: Iterable[MessageLike]) -> list[Message]:
    """Return the same message objects as a list, a `WorkflowError` if it is none; the token graph checks each of them."""
    if type(messages) is not list and (isinstance(messages, (str, Mapping, BaseModel)) or not hasattr(messages, "__iter__")):
        raise WorkflowError(f"messages must be a list of messages, got {type(messages).__name__} {messages!r:.80}")
    checked: list[Any] = [*messages]
    if not checked:
        raise WorkflowError("messages is empty; a model call needs at least one message")
    return checked


def read_sampling(given: Mapping[str, object], defaults: SamplingConfig, *, vocab_size: int) -> SamplingParams:
    """Return the sampling parameters of one call, with the run's `defaults` for what is not given or None.

    `given` has OpenAI names, and top_k, min_p, ignore_eos, stop_token_ids, whose ids are below `vocab_size`.
    """
    given = {name: value for name, value in given.items() if value is not None}
    options = given.get("chat_template_kwargs")
    if options is not None and options != {} and options != defaults.template_options:
        why = f"the run renders with {defaults.template_options}; set `sampling.template_options`"
        _refuse_argument("chat_template_kwargs", options, why)
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    seed = given.get("seed")
    return SamplingParams(
        max_new_tokens=defaults.max_tokens if limit is None else _integer("max_tokens", limit, 1),
        temperature=_temperature(_number(given, "temperature", defaults.temperature, 0.0, MAX_TEMPERATURE)),
        top_p=_top_p(_number(given, "top_p", defaults.top_p, 0.0, 1.0)),
        top_k=_top_k(given.get("top_k", -1)),
        min_p=_number(given, "min_p", 0.0, 0.0, 1.0),
        frequency_penalty=_no_penalty(given, "frequency_penalty"),
        presence_penalty=_no_penalty(given, "presence_penalty"),
        stop=_stop_strings(given.get("stop", ())),
        stop_token_ids=_stop_ids(given.get("stop_token_ids", ()), vocab_size),
        ignore_eos=_read_bool(given, "ignore_eos"),
        seed=None if seed is None else _integer("seed", seed, -(2**63)),
    )


def overruled_sampling(arguments: Mapping[str, object], run: SamplingConfig, *, is_untrained: bool) -> Mapping[str, object]:
    """Return the sampling arguments of a call, by name, that are not used because those of the run hold.

    Arguments that say what the run does anyway are not among them, nor is a limit of tokens that is no larger than the
    run's. With `is_untrained` only those are that no trained or untrained call of the policy can honour, such as penalties.

    Raises:
        WorkflowError: a value is wrong.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    given.update({name: value for name, value in _mapping_argument(given, "extra_body").items() if value is not None})
    own = {name: _number(given, name, 0.0, -2.0, 2.0) for name in ("frequency_penalty", "presence_penalty")}
    found = {name: value for name, value in own.items() if value}
    if is_untrained:
        return found
    read = {
        "temperature": (_number(given, "temperature", run.temperature, 0.0, MAX_TEMPERATURE), run.temperature),
        "top_p": (_number(given, "top_p", run.top_p, 0.0, 1.0), run.top_p),
        "top_k": (_top_k(given.get("top_k", -1)), -1),
        "min_p": (_number(given, "min_p", 0.0, 0.0, 1.0), 0.0),
        "seed": (None if given.get("seed") is None else _integer("seed", given["seed"], -(2**63)), None),
    }
    limits = {name: _integer(name, given[name], 1) for name in ("max_tokens", "max_completion_tokens") if name in given}
    found |= {name: limit for name, limit in limits.items() if limit > run.max_tokens}
    return found | {name: value for name, (value, used) in read.items() if value != used}


def without_arguments(arguments: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """Return the arguments of a call without some, which may also stand in `extra_body`."""
    left = {name: value for name, value in arguments.items() if name not in names}
    body = left.get("extra_body")
    if isinstance(body, Mapping):
        left["extra_body"] = {name: value for name, value in cast("Mapping[str, object]", body).items() if name not in names}
    return left


def _number(given: Mapping[str, object], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise WorkflowError(
        f"{_WHERE}: {name} must be a number between {low:g} and {high:g}, got {type(value).__name__} {_shortened(value)}"
    )


def _integer(name: str, value: object, low: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**63:
        return value
    raise WorkflowError(
        f"{_WHERE}: {name} must be an integer in {low}..2**63-1, got {type(value).__name__} {_shortened(value)}"
    )


def _temperature(value: float) -> float:
    if is_temperature(value):
        return value
    raise WorkflowError(f"{_WHERE}: temperature must be {TEMPERATURE_RULE}, got {value:g}")


def _top_p(value: float) -> float:
    if value > 0:
        return value
    raise WorkflowError(f"{_WHERE}: top_p must be greater than 0, got 0; temperature=0 is greedy")


def _top_k(value: object) -> int:
    if value == -1 or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31):
        return cast("int", value)
    raise WorkflowError(
        f"{_WHERE}: top_k must be a positive integer below 2**31, or -1 for no limit, got {_shortened(value)}"
    )


def _stop_strings(value: object) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if isinstance(stops, Sequence):
        items = tuple(cast("Sequence[object]", stops))
        if all(isinstance(item, str) and item for item in items):
            return cast("tuple[str, ...]", items)
    raise WorkflowError(f"{_WHERE}: stop must be a non-empty string or a list of them, got {_shortened(value)}")


def _stop_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = tuple(cast("Sequence[object]", value))
        if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size for item in items):
            return cast("tuple[int, ...]", items)
    raise WorkflowError(f"{_WHERE}: stop_token_ids must be a list of ids below {vocab_size}, got {_shortened(value)}")


def _no_penalty(given: Mapping[str, object], name: str) -> float:
    value = _number(given, name, 0.0, -2.0, 2.0)
    if value != 0.0:
        _refuse_argument(name, value, "recorded log-probs would include it and the trainer's would not; leave it out")
    return 0.0


def _mapping_argument(given: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = given.get(name, {})
    if isinstance(value, Mapping):
        return cast("Mapping[str, object]", value)
    raise WorkflowError(f"{_WHERE}: {name} must be a mapping, got {type(value).__name__} {_shortened(value)}")


def _read_body(body: Mapping[str, object]) -> dict[str, object]:
    extra = {str(name): value for name, value in body.items()}
    unknown = sorted(extra.keys() - _BODY_NAMES)
    if unknown:
        raise WorkflowError(
            f"{_WHERE}: extra_body has {', '.join(unknown)}, which no backend here honours; "
            f"it may hold {', '.join(sorted(EXTRA_NAMES))}, or a sampling argument"
        )
    return {name: value for name, value in extra.items() if value is not None}


def _check_fixed(given: Mapping[str, object]) -> None:
    """Refuse the values that cannot be honoured of arguments that have one value that can."""
    if given.get("n", 1) != 1:
        _refuse_argument("n", given["n"], "one call is one turn; call it several times, in a task group if you like")
    if given.get("top_logprobs"):
        _refuse_argument(
            "top_logprobs", given["top_logprobs"], "only the sampled tokens' log-probs are returned; leave it out"
        )
    if given.get("modalities", ["text"]) not in (["text"], ("text",)):
        _refuse_argument("modalities", given["modalities"], 'the policy writes text only; pass ["text"], or leave it out')


def _refuse_constraints(given: Mapping[str, object]) -> None:
    """Refuse what only constrained decoding could honour."""
    asks = "`sampling.unsupported: prompt` (`agentrl serve --unsupported prompt`) asks for it in the prompt"
    if given.get("parallel_tool_calls", True) is not True:
        why = f"decoding is unconstrained; leave it out and take the first call in the workflow, or {asks}"
        _refuse_argument("parallel_tool_calls", given["parallel_tool_calls"], why)
    form = given.get("response_format")
    if form is not None and not (isinstance(form, Mapping) and cast("Mapping[str, object]", form).get("type") == "text"):
        why = f'only {{"type": "text"}}; decoding is unconstrained, so parse the text yourself; {asks}'
        _refuse_argument("response_format", form, why)
    choice = given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        why = f"decoding is unconstrained, so no call can be forced; use 'auto' or 'none'; {asks}"
        _refuse_argument("tool_choice", choice, why)


def _read_tools(tools: object) -> list[Mapping[str, object]] | None:
    if tools is None:
        return None
    if not isinstance(tools, Iterable) or isinstance(tools, (str, Mapping)):
        raise WorkflowError(
            f"{_WHERE}: tools must be a list of tool schemas, got {type(tools).__name__} {_shortened(tools)}"
        )
    schemas: list[Mapping[str, object]] = []
    for index, tool in enumerate(cast("Iterable[object]", tools)):
        function = cast("Mapping[str, object]", tool).get("function") if isinstance(tool, Mapping) else None
        name = cast("Mapping[str, object]", function).get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise WorkflowError(
                f'{_WHERE}: tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}, '
                f"got {_shortened(tool)}; a function decorated with @tool has it as `.schema`"
            )
        schemas.append(cast("Mapping[str, object]", tool))
    return schemas or None


def _read_timeout(value: object) -> float | None:
    if isinstance(value, _NOT_GIVEN):
        return None
    if hasattr(value, "read"):
        return _read_timeout(getattr(value, "read", None))
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise WorkflowError(f"{_WHERE}: timeout must be a positive number of seconds, got {_shortened(value)}")
    return float(min(value, _FOREVER_S))


def _refuse_argument(name: str, value: object, why: str) -> NoReturn:
    """Raise `WorkflowError` for a value that cannot be honoured."""
    raise WorkflowError(f"{_WHERE}: {name}={_shortened(value)} cannot be honoured: {why}")


def _shortened(value: object) -> str:
    """Return the repr of a value, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_bool(given: Mapping[str, object], name: str) -> bool:
    """Return a bool argument, False where it is not given; raise `WorkflowError` for any other value."""
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return value is True
    raise WorkflowError(f"{_WHERE}: {name} must be True or False, got {type(value).__name__} {_shortened(value)}")


class CallSeeds:
    """Gives each call of an episode its seed: one with the noise of an earlier call would be no sample of its own.

    Args:
        run_seed: the seed of the run; None leaves calls without a seed of their own to the server.
        episode_id: of the episode.
    """

    def __init__(self, run_seed: int | None, episode_id: str) -> None:
        self._run_seed, self._episode_id = run_seed, episode_id
        self._num_calls = 0
        self._given: set[int] = set()

    def next(self, given: int | None) -> int | None:
        """Return the seed of the next call; `given` is the one of its own, which only the first call that has it keeps."""
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if given is not None and given not in self._given:
            self._given.add(given)
            return given
        base = self._run_seed if given is None else given
        return None if base is None else call_seed(base, self._episode_id, number)


def call_seed(run_seed: int, episode_id: str, call: int) -> int:
    """Return the seed of a model call, 63 bits; `call` is its number in the episode.

    Example:
        >>> call_seed(0, "0.0.0", 0) == call_seed(0, "0.0.0", 0), call_seed(0, "0.0.0", 0) == call_seed(0, "0.0.0", 1)
        (True, False)
    """
    digest = hashlib.blake2b(f"{run_seed}/{episode_id}/{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
