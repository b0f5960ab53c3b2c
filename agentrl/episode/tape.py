"""The tape of an episode: the answers of tools, environments, graders, judges and the clock. A cassette is its file.

Invariant: without a tape nothing changes. A recorded answer is given once, to the same question by the same asker; a
question that was not recorded raises `ReplayDiverged`, and the tape remembers it even if the workflow catches the error. A
cassette appears whole or not at all, and is read only if its format and version are known. Nothing in it depends on the time
of the recording, but for what `now()` returned.

A cassette is one JSON object with the fields of `Cassette`. `episode` has the fields of a line of
`episodes/step-NNNNNN.jsonl` in a run directory; its times are null.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias, cast

import anyio.lowlevel
import msgspec
import orjson

from agentrl.errors import ConfigError, EnvironmentFault, ReplayDiverged
from agentrl.support.concurrency import outside_work

Asked: TypeAlias = Literal["tool", "environment", "grader", "judge", "process", "clock"]
CASSETTE_VERSION: Final = 1
_MAX_QUOTED_CHARS = 300


class TapedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that an episode got from outside; question and answer are JSON."""

    kind: Asked
    name: str
    """Name of the tool, environment, grader, judge or function."""
    request: Any
    result: Any = None
    fault: str | None = None
    """The message of the `EnvironmentFault` that it ended with; null where it answered."""


class Recorder:
    """A tape that records."""

    def __init__(self) -> None:
        self.answers: list[TapedAnswer] = []

    def add(self, kind: Asked, name: str, request: object, result: object = None, fault: str | None = None) -> None:
        """Record an answer; a value that JSON does not have is recorded as its repr."""
        plain: Any = [json.loads(_comparable_json(value)) for value in (request, result)]
        self.answers.append(TapedAnswer(kind=kind, name=name, request=plain[0], result=plain[1], fault=fault))


class Player:
    """A tape that plays `answers` in order; kinds in `live` are asked again and not played."""

    def __init__(self, answers: Sequence[TapedAnswer], *, live: frozenset[Asked] = frozenset()) -> None:
        self.live = live
        self.diverged: list[str] = []
        """Questions of the episode that are not on the tape."""
        self._left = list(answers)

    def unused(self) -> list[TapedAnswer]:
        """Return the answers that were not asked for, without those of a kind that is live."""
        return [answer for answer in self._left if answer.kind not in self.live]

    def find(self, kind: Asked, name: str, request: object) -> TapedAnswer | None:
        """Take the first answer to this question; None: it is not on the tape."""
        asked = _comparable_json(request)
        for index, answer in enumerate(self._left):
            if (answer.kind, answer.name) == (kind, name) and _comparable_json(answer.request) == asked:
                return self._left.pop(index)
        return None

    def take(self, kind: Asked, name: str, request: object) -> object:
        """Return the answer to this question.

        Raises:
            ReplayDiverged: it is not on the tape.
            EnvironmentFault: the recorded question ended with it.
        """
        answer = self.find(kind, name, request)
        if answer is None:
            self.diverge(f"the episode asked {kind} {name} {_quoted_json(request)}, {self._describe_next(kind, name)}")
        if answer.fault is not None:
            raise EnvironmentFault(answer.fault)
        return answer.result

    def diverge(self, what: str) -> NoReturn:
        """Remember that the episode is another one, and raise."""
        self.diverged.append(what)
        raise ReplayDiverged(what)

    def _describe_next(self, kind: Asked, name: str) -> str:
        for answer in self._left:
            if (answer.kind, answer.name) == (kind, name):
                return f"where {_quoted_json(answer.request)} was recorded"
        return "and no further answer of it was recorded"


_tape: ContextVar[Recorder | Player | None] = ContextVar("agentrl_tape", default=None)


@contextmanager
def using_tape(tape: Recorder | Player | None) -> Generator[None]:
    """Use `tape` in the block, and in the tasks and threads that it starts; None: none."""
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


async def ask(kind: Asked, name: str, request: object, live: Callable[[], Awaitable[object]]) -> object:
    """Return the result of `live`, or the answer on the tape of this episode in its place.

    Call it inside the `environment_boundary` of the same operation. What `live` asks itself is not recorded, nor are its
    errors other than EnvironmentFault.

    Raises:
        ReplayDiverged: a tape plays, and the question is not on it.
    """
    tape = _tape.get()
    with outside_work():
        if isinstance(tape, Player):
            if kind in tape.live:
                return await live()
            await anyio.lowlevel.checkpoint()
            return tape.take(kind, name, request)
        if tape is None:
            return await live()
        try:
            with using_tape(None):
                result = await live()
        except EnvironmentFault as fault:
            tape.add(kind, name, request, fault=str(fault))
            raise
    tape.add(kind, name, request, result)
    return result


async def run_and_compare(kind: Asked, name: str, request: object, live: Callable[[], Awaitable[object]]) -> object:
    """Return the result of `live`; it runs on a replay too, because the episode needs its effects.

    What it asks itself is recorded and played.

    Raises:
        ReplayDiverged: a tape plays, and holds another answer to the question.
    """
    tape = _tape.get()
    with outside_work():
        result = await live()
    if isinstance(tape, Recorder):
        tape.add(kind, name, request, result)
    elif tape is not None and kind not in tape.live:
        answer = tape.find(kind, name, request)
        if answer is not None and _comparable_json(answer.result) != _comparable_json(result):
            answers = f"{_quoted_json(result)}, where {_quoted_json(answer.result)} was recorded"
            tape.diverge(f"{kind} {name}, asked {_quoted_json(request)}, answered {answers}")
    return result


def recording() -> Recorder | None:
    """Return the tape, if one records."""
    tape = _tape.get()
    return tape if isinstance(tape, Recorder) else None


def playing(kind: Asked) -> Player | None:
    """Return the tape, if one plays answers of this kind."""
    tape = _tape.get()
    return tape if isinstance(tape, Player) and kind not in tape.live else None


def now() -> float:
    """Return the seconds since 1970, as `time.time()`; a cassette records them, and a replay returns the same.

    Raises:
        ReplayDiverged: a tape plays, and the clock was read less often when it was recorded.
    """
    player = playing("clock")
    if player is not None:
        return cast("float", player.take("clock", "now", None))
    seconds = time.time()
    if (tape := recording()) is not None:
        tape.add("clock", "now", None, seconds)
    return seconds


class Cassette(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded episode."""

    format: Literal["agentrl.cassette"] = "agentrl.cassette"
    version: int = CASSETTE_VERSION
    workflow: str
    """The workflow that was recorded, `module:Name`."""
    workflow_args: dict[str, Any]
    answers: list[TapedAnswer]
    """Answers of tools, environments, graders, judges, worker processes and the clock, in order."""
    episode: msgspec.Raw
    """The task, the model calls and the rewards."""


def write_cassette(path: Path, cassette: Cassette) -> None:
    """Write a cassette, in place of an earlier one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(msgspec.json.encode(cassette) + b"\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_cassette(path: Path) -> Cassette:
    """Return the cassette in a file; raises ConfigError where it cannot be read, or is no cassette of this version."""
    try:
        cassette = msgspec.json.decode(path.read_bytes(), type=Cassette)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this cassette: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no cassette: {error}; `agentrl record` writes one") from error
    if cassette.version != CASSETTE_VERSION:
        raise ConfigError(
            f"{path}: expected a cassette of version {CASSETTE_VERSION}, got version {cassette.version}; record it again"
        )
    return cassette


def _comparable_json(value: object) -> bytes:
    """Return a value as JSON for a file: NaN is null, half of a surrogate pair a question mark; any integer is kept."""
    try:
        text = json.dumps(value, default=_plain_form)
        plain = json.loads(text, parse_constant=lambda _: None)
        return _dumped(plain)
    except RecursionError:
        return _dumped(f"<{type(value).__qualname__} that is nested too deep>")
    except (TypeError, ValueError):  # keys that JSON does not have, or a value that contains itself
        return _dumped(repr(value))


def _dumped(plain: object) -> bytes:
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _plain_form(value: object) -> object:
    try:
        return orjson.loads(orjson.dumps(value))
    except TypeError:
        return repr(value)


def _quoted_json(value: object) -> str:
    text = _comparable_json(value).decode()
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."
