"""Plays the calls of a multi-turn task of BFCL on the package's own backends, in a worker process.

Invariant: a state follows from the task and the calls alone, which are made again for each question. Only methods that the
task describes are called, with plain data. The backends live in memory: they touch no file, process or network.
"""

from __future__ import annotations

import copy
import decimal
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from agentrl.types import JsonValue
from agentrl_envs.data_packages import BFCL_EVAL

_BACKENDS: Final = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
MODULES: Final[Mapping[str, str]] = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""The module of each backend, which is also the name of the file that describes its functions."""


class _Call(NamedTuple):
    name: str
    positional: Sequence[JsonValue]
    keywords: Mapping[str, JsonValue]


class _Backends:
    """The backends of one task."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.backends: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., object]] = {}
        for name in cast("Sequence[str]", task["classes"]):
            backend = getattr(importlib.import_module(f"{_BACKENDS}.{MODULES[name]}"), name)()
            if hasattr(backend, "_load_scenario"):
                config = copy.deepcopy(task["initial_config"].get(name, {}))
                backend._load_scenario(config, long_context=bool(task["long_context"]))
            self.backends[name] = backend
            # Later classes win, as in the package.
            self._methods |= {each: getattr(backend, each) for each in task["methods"] if hasattr(backend, each)}

    def call(self, call: _Call) -> str:
        """Return what a call gives, or its error, as the package writes it for the model."""
        method = self._methods.get(call.name)
        if method is None:
            return f"Error: there is no function {call.name!r}"
        try:
            value = method(*copy.deepcopy(call.positional), **copy.deepcopy(dict(call.keywords)))
        except Exception as error:  # noqa: BLE001 - the policy's arguments; the package shows it to the model
            return f"Error during execution: {error}"
        if isinstance(value, dict):
            try:
                return json.dumps(value)
            except (TypeError, ValueError):
                return str(cast("object", value))
        return str(value)

    def has_state_of(self, other: _Backends) -> bool:
        """Compare the public attributes of all backends."""
        return all(
            getattr(backend, name) == value
            for key, backend in self.backends.items()
            for name, value in vars(other.backends[key]).items()
            if not name.startswith("_")
        )


def load_bfcl_player() -> Callable[[Mapping[str, Any], Sequence[Sequence[Sequence[Any]]]], JsonValue]:
    """Return the function that a worker runs."""
    BFCL_EVAL.distribution()
    return play_turns


def play_turns(task: Mapping[str, Any], turns: Sequence[Sequence[Sequence[Any]]]) -> JsonValue:
    """Return the results of the calls of the last turn, and whether the turns so far are right.

    A turn is right if the state is that of the ground truth, and its results hold those of the ground truth; earlier ones
    count, too, since a call need not be repeated. A turn without ground truth asks for a reply and is not compared.

    Args:
        task: `classes`, `initial_config`, `long_context`, `methods` and `answers`: name, positional arguments and keyword
            arguments of each call of each turn.
        turns: name and arguments of the policy's calls, turn by turn.
    """
    with decimal.localcontext():  # MathAPI sets its precision
        return _play_both(_Backends(task), _Backends(task), task["answers"], turns)


def _play_both(
    mine: _Backends,
    truth: _Backends,
    every_answer: Sequence[Sequence[Sequence[Any]]],
    turns: Sequence[Sequence[Sequence[Any]]],
) -> JsonValue:
    seen: list[str] = []
    results: list[str] = []
    is_right = True
    for calls, answers in zip(turns, every_answer, strict=False):
        results = [mine.call(_Call(name, (), arguments)) for name, arguments in calls]
        expected = [truth.call(_Call(*answer)) for answer in answers]
        seen += results
        if answers:
            is_right = is_right and bool(calls) and mine.has_state_of(truth) and _holds(seen, expected)
    return {"results": cast("JsonValue", results), "is_right": is_right}


def _holds(results: Sequence[str], expected: Sequence[str]) -> bool:
    left = list(results)
    for each in expected:
        if each not in left:
            return False
        left.remove(each)
    return True
