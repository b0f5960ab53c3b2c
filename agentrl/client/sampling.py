"""Sampling arguments: read, checked, and filled in with the run's defaults.

Invariant: what is returned is within the bounds every backend takes, so a wrong value never reaches a server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

from agentrl.client.config import SamplingConfig
from agentrl.errors import WorkflowError
from agentrl.inference.base import SamplingParams

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
