"""The parts that commands share: flags, run files, files that they write, and the end of a command.

Invariant: bad input prints one message and exits with status 2; a failed run prints one message and exits with status 1.
Ctrl-C and SIGTERM end everything that the command started and print where the results are. A traceback on the terminal is
a bug. This module is light: `agentrl --help` imports it.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter

from agentrl.errors import AgentRLError, ConfigError
from agentrl.processes.watchdog.signals import interrupt_note, interrupt_text, print_error, print_interrupt, sigterm_raises
from agentrl.support.exact_json import decode_exact_json
from agentrl.support.foreign import make_log_visible, visible

if TYPE_CHECKING:
    from agentrl.config import RunConfig

Overrides = Annotated[str, Parameter(allow_leading_hyphen=True)]
"""Fields of a run file that a command line overrides."""
_TRIAL = bytes(4096)


def load_run(path: Path, overrides: Sequence[str], defaults: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the run of a YAML file, with the fields that the command line overrides; `defaults` are for missing ones."""
    from agentrl.config import load_config

    return load_config(path, overrides, defaults)


def run_job(
    job: Callable[[], Awaitable[object]], results: Callable[[], str], *, stall_timeout_s: float | None = None
) -> None:
    """Run an async job to its end; the job itself ends what it started."""
    from agentrl.processes.watchdog.loop import run_watched
    from agentrl.processes.watchdog.signals import run_without_waiting

    with interrupt_note(results):
        if stall_timeout_s is None:
            run_without_waiting(job)
        else:
            run_watched(job, stall_timeout_s=stall_timeout_s, on_exit=lambda _ending: results())


def run_command(command: Callable[[], object]) -> None:
    """Run a command and exit: agentrl's errors become one message and status 2 or 1, Ctrl-C 130 and SIGTERM 143."""
    make_log_visible()
    try:
        with sigterm_raises():
            command()
    except KeyboardInterrupt as interrupt:
        # Python, as `python -m`, ends by a signal of its own once an interrupt has left an `exec`, as dataclasses have one;
        # the next `exec` takes that back.
        exec("")
        sys.exit(print_interrupt(interrupt))
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (AgentRLError, BaseExceptionGroup) as error:
        ours = first_agentrl_error(error)
        if ours is None:
            raise
        print_error(visible(f"agentrl: {ours}"))
        sys.exit(2 if isinstance(ours, ConfigError) else 1)


def _reader_left() -> bool:
    """Return whether the reader of standard output has what it wanted, as in `agentrl config | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are reported in any case
    return bool(output.poll(0))


def first_agentrl_error(error: BaseException) -> AgentRLError | None:
    """Return the first agentrl error inside an exception or exception group; None if there is none."""
    if isinstance(error, AgentRLError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := first_agentrl_error(inner)) is not None), None)
    return None


def describe_error(error: BaseException) -> str:
    """Return one message for an exception, whatever groups wrap it."""
    if isinstance(error, KeyboardInterrupt):
        return interrupt_text(error)
    ours = first_agentrl_error(error)
    return str(ours) if ours is not None else f"{type(error).__name__}: {error}"


def check_writable(path: Path, what: str) -> None:
    """Check, before a command starts its work, that it can write `path`; a trial file is written and removed."""
    place = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with NamedTemporaryFile(dir=place, prefix=f".{path.name}.") as trial:
            trial.write(_TRIAL)
            trial.flush()
    except OSError as error:
        raise ConfigError(f"{what}: cannot write in {place}: {error.strerror}; fix that, or write elsewhere") from error


def parse_json_object(text: str, flag: str) -> dict[str, Any]:
    """Return the fields of the JSON object that `flag` gives as text; a `ConfigError` for any other text."""
    try:
        found = decode_exact_json(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text[:80]}")
    return cast("dict[str, Any]", found)


def parse_named_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that `name=value` words give; a value is read as YAML.

    Raises:
        ConfigError: a word has no `=`, or its value is no YAML.
    """
    from agentrl.config.yaml import NOT_YAML, load_yaml  # for the few commands that take such words

    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise ConfigError(f"expected name=value, got {word!r}")
        try:
            found[name] = load_yaml(value)
        except NOT_YAML as error:
            raise ConfigError(f"the value of {name} is no YAML: {error}") from None
    return found
