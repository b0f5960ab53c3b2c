"""Functions in worker processes, for code that must not share a process or a thread with the episodes.

Invariant: only names and JSON cross to a worker. A call runs once, and its process is killed at its timeout.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Callable
from typing import Final, cast

from anyio.lowlevel import RunVar

from agentrl.client.tools.errors import ToolError
from agentrl.env import environment_boundary
from agentrl.episode.tape import ask
from agentrl.errors import EnvironmentFault
from agentrl.processes.jobs import WorkerLost, WorkerPool, WorkerSettings
from agentrl.types import JsonValue

MAX_PROCESSES: Final = max(2, min(8, os.cpu_count() or 1))
"""Worker processes of one event loop; further calls wait."""
PROCESS_TIMEOUT_S: Final = 60.0


async def in_process(function: Callable[..., object], *args: JsonValue, timeout: float = PROCESS_TIMEOUT_S) -> JsonValue:
    """Return the JSON value that `function(*args)` returns in a worker process, for code that cannot run in a thread.

    A process starts at the first call, serves further calls, and inherits the environment variables.

    Args:
        function: a plain function of a module, which the worker imports by its name.
        args: JSON values. A tuple arrives as a list.
        timeout: seconds of work; the wait for a free process and its start do not count.

    Raises:
        TypeError: the function has no name to import it by, or is async; an argument is not JSON.
        ToolError: the function raised it.
        EnvironmentFault: the function raised anything else, returned what is not JSON, hung, or crashed its process.

    Example:
        value = await agentrl.in_process(my_simulator.run, state, 10, timeout=30)
    """
    name = importable_name(function)
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"in_process {name}: an async function runs in the event loop; await it there")
    found = resolve_name(name)
    if found is not function and getattr(found, "__wrapped__", None) is not function:
        raise TypeError(f"in_process: {name} is {found!r:.80}, and not the function that was passed")
    try:
        arguments = json.dumps(args)
    except (TypeError, ValueError) as error:
        raise TypeError(f"in_process {name}: expected arguments that are JSON: {error}") from None
    where = f"in_process {name}"

    async def live() -> JsonValue:
        return await call_by_name(where, "function", name, arguments, timeout=timeout)

    return cast("JsonValue", await ask("process", name, list(args), live))


async def call_by_name(where: str, kind: str, name: str, arguments: str, *, timeout: float) -> JsonValue:
    """Return the worker's reply to a call from `where`; `kind` is `function` or `tool`. Raises as `in_process`."""
    with environment_boundary(where):
        try:
            reply = await _pool_of_this_loop().run(kind, name, arguments, wall_s=timeout)
        except (WorkerLost, EnvironmentFault) as error:
            raise EnvironmentFault(f"{where}: {error}") from None
        if reply.limit is not None:
            raise EnvironmentFault(f"{where}: the function ran out of {reply.limit}; give it less work in one call")
        outcome = cast("dict[str, JsonValue]", reply.value)
    if "tool_error" in outcome:
        raise ToolError(str(outcome["tool_error"]))
    return outcome["value"]


def importable_name(function: Callable[..., object]) -> str:
    """Return the `module:qualname` of `function`, or raise TypeError if a worker process cannot import it."""
    module: object = getattr(function, "__module__", None)
    name: object = getattr(function, "__qualname__", None)
    reason = None
    if not isinstance(module, str) or not isinstance(name, str):
        reason = "it has no module and name"
    elif inspect.ismethod(function):
        reason = "a bound method carries an object, which stays in this process"
    elif "<" in name:
        reason = "it is made inside another function or is a lambda"
    elif module == "__main__":
        reason = "it is in the main script, which a worker cannot import; move it into a module"
    if reason is not None:
        raise TypeError(
            f"{getattr(function, '__qualname__', repr(function))} cannot run in a worker process, which imports it by its "
            f"name: {reason}; expected a function at the top of a module"
        )
    return f"{module}:{name}"


def resolve_name(name: str) -> object:
    """Return the object that `module:qualname` names."""
    module, _, path = name.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


_loop_pool: RunVar[WorkerPool] = RunVar("agentrl_tool_processes")


def _pool_of_this_loop() -> WorkerPool:
    try:
        return _loop_pool.get()
    except LookupError:
        settings = WorkerSettings(
            loader="agentrl.client.tools.worker:load_caller", name="a worker process", inherits_environment=True
        )
        pool = WorkerPool(settings, num_workers=MAX_PROCESSES)
        _loop_pool.set(pool)
        return pool
