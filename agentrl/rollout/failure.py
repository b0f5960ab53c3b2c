"""The errors that end a run, and the records that the others make of an episode.

Invariant: an error of the policy, an environment or a server fails an episode. An error of agentrl itself ends the run.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from typing import Final

from agentrl.errors import (
    AgentRLError,
    EnvironmentFault,
    InvariantError,
    RunStopped,
    ServerError,
    StaleDataError,
    TrainError,
    WeightSyncError,
    WorkflowError,
)
from agentrl.support.foreign import shortened, visible
from agentrl.types import EpisodeFailure, StopReason

_COROUTINE: Final = "'coroutine' object"
_MISSING_AWAIT: Final = "; an await is missing: write `await client.chat.completions.create(...)`"
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARY = sysconfig.get_path("stdlib") + os.sep

RUN_ENDING: Final = (InvariantError, StaleDataError, WeightSyncError, TrainError, RunStopped)
"""Errors that an episode raises instead of recording them."""


def failure_stop_reason(error: AgentRLError) -> StopReason:
    """Return why an episode with this error ended."""
    if isinstance(error, ServerError):
        return StopReason.SERVER_ERROR
    if isinstance(error, EnvironmentFault):
        return StopReason.ENVIRONMENT_FAULT
    return StopReason.WORKFLOW_ERROR


def episode_failure(error: AgentRLError) -> EpisodeFailure:
    """Return the record of an error, with its traceback, shortened."""
    message = f"{error}{_MISSING_AWAIT}" if _COROUTINE in str(error) else str(error)
    return EpisodeFailure(
        kind=type(error).__name__, message=visible(shortened(message)), traceback=visible(shortened(user_trace(error)))
    )


def raising_line(error: AgentRLError) -> str | None:
    """Return the line of the user's code that raised, as `agent.py:12`; None where no code outside agentrl did."""
    place = _user_frame(_raised_by_user(error))
    return None if place is None else f"{Path(place.filename).name}:{place.lineno}"


def user_trace(error: BaseException) -> str:
    """Return the traceback of an error, the place in the user's code first, as far as possible without agentrl's frames."""
    raised = _raised_by_user(error)
    place = _user_frame(raised)
    if place is None:
        return "".join(traceback.format_exception(error))
    described = traceback.TracebackException.from_exception(raised)
    _leave_out_ours(described)
    problem = "".join(traceback.format_exception_only(raised)).strip()
    where = f"{Path(place.filename).name}:{place.lineno} in {place.name}: {problem}"
    return f"{where}\n(frames of agentrl are left out)\n{''.join(described.format())}"


def _raised_by_user(error: BaseException) -> BaseException:
    """Return what the user's code raised, where `error` only tells where that was."""
    # agentrl wraps what the user's code raises; the user looks for their own line.
    while isinstance(error, (WorkflowError, EnvironmentFault)) and error.__cause__ is not None and not _own_frames(error):
        error = error.__cause__
    return error


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame of the user's code; of other people's packages, where there is no such frame."""
    others = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    return (_own_frames(error) or others or [None])[-1]


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not _is_ours(frame.filename) and not _is_library(frame.filename)]


def _leave_out_ours(described: traceback.TracebackException) -> None:
    waiting = [described]  # no recursion: a chain of causes may be longer than Python's stack
    while waiting:
        one = waiting.pop()
        one.stack[:] = [frame for frame in one.stack if not _is_ours(frame.filename)] or one.stack
        below = (one.__cause__, one.__context__, *(one.exceptions or ()))
        waiting += [each for each in below if each is not None]


def _is_ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or "dist-packages" in filename or filename.startswith((_LIBRARY, "<"))
