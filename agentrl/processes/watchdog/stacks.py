"""The code that a thread or a task is running, as lines that a person can act on.

Invariant: nothing here runs or changes the code it looks at. Frames of the event loop are left out; where the user's
code is on the stack, so is everything that called it.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from asyncio import Task
from types import FrameType
from typing import Any, NamedTuple

_MAX_FRAMES = 6


class _StackLine(NamedTuple):
    file: str
    line: int
    name: str


def blocking_code(thread_id: int) -> list[str]:
    """Return what a thread is running, innermost frame first, as `file:line in function: source`."""
    return _readable(_thread_stack(thread_id))


def is_in_user_code(thread_id: int) -> bool:
    """Return whether a thread runs code that belongs neither to agentrl nor to the event loop."""
    return bool(_user_frames(_thread_stack(thread_id)))


def user_place(thread_id: int) -> tuple[str, str] | None:
    """Return the user's function that a thread runs, and its present line; None where agentrl itself runs."""
    for entry in _thread_stack(thread_id):
        if entry.file.startswith(_MACHINERY):
            return None
        if _is_users(entry.file):
            return f"{entry.name} in {entry.file}", _readable([entry])[0]
    return None


def workflow_code(task: Task[Any]) -> list[str] | None:
    """Return the frames of a task's suspended workflow, innermost first; None if the task runs no workflow.

    Frames of libraries are left out unless the workflow has no other. Call it on the event loop.
    """
    stack: list[_StackLine] = []
    awaited: Any = task.get_coro()
    within = False
    while awaited is not None:
        frame = (
            getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or getattr(awaited, "ag_frame", None)
        )
        if frame is not None:
            entry = _stack_line(frame)
            if within:
                stack.append(entry)
            within = within or (entry.file, entry.name) == _WORKFLOW_CALL
        awaited = (
            getattr(awaited, "cr_await", None)
            or getattr(awaited, "gi_yieldfrom", None)
            or getattr(awaited, "ag_await", None)
        )
    own = [stack[index] for index in _user_frames(stack) if _LIBRARIES not in stack[index].file]
    return _readable((own or stack)[::-1]) if within else None


def indented(lines: list[str]) -> str:
    """Return lines of code as an indented part of a message."""
    return "\n".join(f"  {line}" for line in lines)


def _thread_stack(thread_id: int) -> list[_StackLine]:
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] - the only way to see another thread
    stack: list[_StackLine] = []
    while frame is not None and not (frame.f_code.co_filename.startswith(_LOOP) and frame.f_code.co_name == "_run"):
        stack.append(_stack_line(frame))
        frame = frame.f_back
    return stack


def _stack_line(frame: FrameType) -> _StackLine:
    return _StackLine(frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno, frame.f_code.co_qualname)


def _user_frames(stack: list[_StackLine]) -> list[int]:
    return [
        index
        for index, entry in enumerate(stack)
        if not entry.file.startswith(_MACHINERY) and not entry.file.startswith("<frozen ")
    ]


def _is_users(file: str) -> bool:
    """Return whether a file is neither of a library nor made at run time, as a chat template is."""
    if any(part in file for part in _BUNDLED) or file.startswith("<ipython"):
        return True
    return not file.startswith(("<", _STANDARD_LIBRARY)) and _LIBRARIES not in file


def _readable(stack: list[_StackLine]) -> list[str]:
    stack = [entry for entry in stack if not entry.file.startswith("<frozen ")]
    users = _user_frames(stack)
    visible = stack[: users[-1] + 1 if users else None][:_MAX_FRAMES]
    here = os.getcwd() + os.sep
    return [
        f"{entry.file.removeprefix(here)}:{entry.line} in {entry.name}: {linecache.getline(entry.file, entry.line).strip()}"
        for entry in visible
    ]


def _package_folder(package: str) -> str:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(found.origin) + os.sep


_LOOP = _package_folder("asyncio")
_MACHINERY = (_LOOP, _package_folder("anyio"), _package_folder("agentrl"))
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
"""Holds installed packages too."""
_BUNDLED = (f"{os.sep}agentrl_workflows{os.sep}", f"{os.sep}agentrl_envs{os.sep}")
_LIBRARIES = f"{os.sep}site-packages{os.sep}"
_WORKFLOW_CALL = (os.path.join(_package_folder("agentrl"), "rollout", "episode.py"), "_unwrapped")
"""The function that calls a workflow: every frame inside it belongs to the workflow."""
