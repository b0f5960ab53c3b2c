"""The program that runs one test function in the sandbox, where a stand-in takes the place of the submission.

Invariant: no code of the submission runs here. The job holds the answers to the first calls; the next call is sent, and ends
the program. Calls are the same each time, so that a later run with one more answer comes one call further.
"""

from __future__ import annotations

import builtins
import importlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, Final, cast

TEST_FILE: Final = "hidden_tests"


class _OwnError(Exception):
    """Stands for an exception of a class that the submission defines."""


class _RecordedCalls:
    """Answers calls in turn, as recorded; it sends the first one that has no answer."""

    def __init__(self, channel: Any, answers: list[list[str]]) -> None:  # noqa: ANN401 - a module that comes later
        self._channel, self._answers, self.num_answered = channel, answers, 0
        self.raised: BaseException | None = None

    def answer(self, entry: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        from agentrl_rewards.code.values import decode_value, encode_arguments

        try:
            call = json.dumps([entry, encode_arguments(list(arguments)), encode_arguments(keywords)])
        except TypeError as error:
            self._channel.end("unsupported", json.dumps(f"{entry}: {error}"))
            raise
        if self.num_answered == len(self._answers):
            self._channel.end("call", call)
        recorded, kind, text = self._answers[self.num_answered]
        if recorded != call:
            self._channel.end("changed", json.dumps(entry))
        self.num_answered += 1
        if kind == "raised":
            self.raised = _error(*cast("list[str]", json.loads(text))[:2])
            raise self.raised
        return decode_value(text)


class _Function:
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, calls: _RecordedCalls, entry: str) -> None:
        self._calls, self._entry = calls, entry

    def __call__(self, *arguments: object, **keywords: object) -> object:
        return self._calls.answer(self._entry, arguments, keywords)

    def __eq__(self, other: object) -> bool:
        raise TypeError(f"{self._entry} of the submission can only be called")

    def __bool__(self) -> bool:
        raise TypeError(f"{self._entry} of the submission can only be called")


def _error(name: str, message: str) -> BaseException:
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        try:
            return found(message)
        except TypeError:  # it takes other arguments
            pass
    return _OwnError(message)


class _Raises:
    def __init__(self, expected: type[BaseException] | tuple[type[BaseException], ...], *, match: str | None = None) -> None:
        self._expected, self._match = expected, match
        self.value: BaseException | None = None
        self.type: type[BaseException] | None = None

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is None:
            raise AssertionError("nothing was raised")
        if not isinstance(error, self._expected):
            return False
        if self._match is not None and not re.search(self._match, str(error)):
            raise AssertionError("the error has another text")
        self.value, self.type = error, type(error)
        return True


class _Approx:
    """`pytest.approx` for numbers, and for lists, tuples and dicts of them."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: object, rel: float | None = None, abs: float | None = None) -> None:
        self._expected = expected
        self._rel = (1e-6 if abs is None else 0.0) if rel is None else rel
        self._abs = 1e-12 if abs is None else abs

    def __eq__(self, found: object) -> bool:
        return self._is_near(self._expected, found)

    def _is_near(self, expected: Any, found: Any) -> bool:  # noqa: ANN401 - whatever the tests expect
        if isinstance(expected, Mapping):
            is_like = isinstance(found, Mapping) and found.keys() == expected.keys()
            return is_like and all(self._is_near(expected[key], found[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            is_like = isinstance(found, (list, tuple)) and len(found) == len(expected)
            return is_like and all(map(self._is_near, expected, found))
        if expected == found:
            return True
        if not isinstance(expected, (int, float, complex)) or not isinstance(found, (int, float, complex)):
            return False
        distance = abs(expected - found)
        return distance <= max(self._abs, self._rel * abs(expected)) and distance != float("inf")


class _Mark:
    @staticmethod
    def parametrize(names: str, values: Sequence[Any]) -> Any:  # noqa: ANN401 - a decorator
        keys = [name.strip() for name in names.split(",")]

        def marked(function: Any) -> Any:  # noqa: ANN401 - a test function
            rows = [dict(zip(keys, [row] if len(keys) == 1 else row, strict=True)) for row in values]
            function.parameters = [{**each, **row} for each in getattr(function, "parameters", [{}]) for row in rows]
            return function

        return marked


def _modules(calls: _RecordedCalls, name: str) -> Iterator[tuple[str, ModuleType]]:
    shim = ModuleType("pytest")
    shim.raises, shim.approx, shim.mark = _Raises, _Approx, _Mark  # type: ignore[attr-defined]
    yield "pytest", shim
    stand_in = ModuleType(name)
    stand_in.__getattr__ = lambda entry: _Function(calls, entry)  # type: ignore[method-assign]
    yield name, stand_in


def run_test() -> None:
    """Read the job from standard input, run the test function, and send how it ended."""
    from agentrl_rewards.code.runner import READY_WIDTH, Channel

    job = cast("dict[str, Any]", json.loads(sys.stdin.buffer.read()))
    channel = Channel(job["nonce"])
    channel.send("ready", " " * READY_WIDTH)
    calls = _RecordedCalls(channel, job["answers"])
    sys.modules.update(_modules(calls, job["module"]))
    try:
        test = getattr(importlib.import_module(TEST_FILE), job["test"])
        for parameters in getattr(test, "parameters", [{}]):
            if test(**parameters) is not None:
                raise TypeError("a test function returns nothing")
    except BaseException as error:  # noqa: BLE001 - any error fails the test
        kind = "raised" if error is calls.raised else "failed"
        name = type(error).__name__ if kind == "failed" else ""
        channel.end(kind, json.dumps([name, calls.num_answered]))
        return
    channel.end("passed", json.dumps(["", calls.num_answered]))


if __name__ == "__main__":
    run_test()
