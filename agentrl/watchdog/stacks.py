"""Whose code is in the way: what a thread or a task is doing, told as a person can use it.

Invariant: nothing here runs or changes what it looks at. The event loop is left out, and so is everything around the user's
code where that is on the stack.
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


class _Entry(NamedTuple):
    file: str
    line: int
    name: str


def blocking_code(thread_id: int) -> list[str]:
    """Return what a thread is doing, innermost first, as `file:line in function: source`."""
    return _readable(_thread_stack(thread_id))


def is_users(thread_id: int) -> bool:
    """Return whether a thread is in code that is neither ours nor the event loop's."""
    return bool(_users(_thread_stack(thread_id)))


def workflow_code(task: Task[Any]) -> list[str] | None:
    """Return where a task's workflow is suspended, innermost first; None if the task is not within a workflow.

    Libraries are left out, but for a workflow that is nothing else. Call it on the event loop.
    """
    stack: list[_Entry] = []
    awaited: Any = task.get_coro()
    within = False
    while awaited is not None:
        frame = (
            getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or getattr(awaited, "ag_frame", None)
        )
        if frame is not None:
            entry = _entry(frame)
            if within:
                stack.append(entry)
            within = within or (entry.file, entry.name) == _WORKFLOW_CALL
        awaited = (
            getattr(awaited, "cr_await", None)
            or getattr(awaited, "gi_yieldfrom", None)
            or getattr(awaited, "ag_await", None)
        )
    own = [stack[index] for index in _users(stack) if _LIBRARIES not in stack[index].file]
    return _readable((own or stack)[::-1]) if within else None


def listed(lines: list[str]) -> str:
    """Return lines of code as part of a message."""
    return "\n".join(f"  {line}" for line in lines)


def _thread_stack(thread_id: int) -> list[_Entry]:
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage] - the only way to see another thread
    stack: list[_Entry] = []
    while frame is not None and not (frame.f_code.co_filename.startswith(_LOOP) and frame.f_code.co_name == "_run"):
        stack.append(_entry(frame))
        frame = frame.f_back
    return stack


def _entry(frame: FrameType) -> _Entry:
    return _Entry(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def _users(stack: list[_Entry]) -> list[int]:
    return [
        index
        for index, entry in enumerate(stack)
        if not entry.file.startswith(_MACHINERY) and not entry.file.startswith("<frozen ")
    ]


def _readable(stack: list[_Entry]) -> list[str]:
    stack = [entry for entry in stack if not entry.file.startswith("<frozen ")]
    users = _users(stack)
    visible = stack[: users[-1] + 1 if users else None][:_MAX_FRAMES]
    here = os.getcwd() + os.sep
    return [
        f"{entry.file.removeprefix(here)}:{entry.line} in {entry.name}: {linecache.getline(entry.file, entry.line).strip()}"
        for entry in visible
    ]


def _home(package: str) -> str:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(found.origin) + os.sep


_LOOP = _home("asyncio")
_MACHINERY = (_LOOP, _home("anyio"), _home("agentrl"))
_LIBRARIES = f"{os.sep}site-packages{os.sep}"
_WORKFLOW_CALL = (os.path.join(_home("agentrl"), "rollout", "episode.py"), "_unwrapped")
"""What calls a workflow; everything inside of it is the workflow's doing."""
