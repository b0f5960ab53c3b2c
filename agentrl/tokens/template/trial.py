"""A first run of a chat template, which is foreign code, in a forked process with limits on memory and time.

Invariant: a template that takes more than the limits, when it is compiled or for an ordinary conversation, is refused, and
takes them from no process but the fork. A template that misbehaves only later has the limits of `ChatTemplate.render` alone.
"""

from __future__ import annotations

import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from agentrl.errors import ConfigError, TokenError
from agentrl.tokens.template.rendering import ChatTemplate, PlainMessage, ToolSchemas

MEMORY_BYTES = 2**30
"""Memory that the renderings may take, on top of what the process has."""
CPU_SECONDS = 10
"""Processor time of all renderings together; a usual template takes a few milliseconds."""
_WALL_SECONDS = 120.0
_OUT_OF_MEMORY = 3
"""Exit status of the fork."""
_CALL: dict[str, object] = {"name": "search", "arguments": {"query": "weather", "limit": 3}}
_TOOLS: ToolSchemas = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]
_LENGTHS = (1, 2, 12)
"""Rounds of the conversations."""


def try_out(build: Callable[[], ChatTemplate], where: str, *, cpu_seconds: int = CPU_SECONDS) -> None:
    """Compile a template with `build` and render ordinary conversations in a fork of this process.

    An error of `build`, and what the template refuses, is no finding here: this process meets it again, and reports it.

    Raises:
        ConfigError: the template takes too much memory, or more than `cpu_seconds` for all renderings together.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the fork renders and exits
        child = os.fork()
    if not child:
        _render_and_exit(build, cpu_seconds)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not status:
        return
    too_much = "memory" if status == _OUT_OF_MEMORY else f"time (it was ended by {_ending_name(status)})"
    raise ConfigError(
        f"{where}: the chat template takes too much {too_much} for a conversation of {2 + 4 * _LENGTHS[-1]} short messages; "
        f"the limits are {MEMORY_BYTES >> 20} MiB and {cpu_seconds} s. It is not fit for use: take the template of the "
        "original model"
    )


def _ending_name(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _render_and_exit(build: Callable[[], ChatTemplate], cpu_seconds: int) -> NoReturn:
    """Render under limits and end the process; no handler or clean-up of the parent's runs here."""
    status = 1
    try:
        for number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
        with suppress(FileNotFoundError):  # where there is no /proc, memory has no limit
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
        template = build()
        status = max(_render(template, rounds, tools) for rounds in _LENGTHS for tools in (None, _TOOLS))
    except MemoryError:
        status = _OUT_OF_MEMORY
    except Exception:  # noqa: BLE001 - the parent meets the error again
        status = 0
    finally:
        os._exit(status)


def _render(template: ChatTemplate, rounds: int, tools: ToolSchemas | None) -> int:
    try:
        template.render(_short_conversation(rounds, with_calls=tools is not None), tools, generation_prompt=True)
    except TokenError as error:
        if isinstance(error.__cause__, MemoryError):
            return _OUT_OF_MEMORY
    return 0


def _short_conversation(rounds: int, *, with_calls: bool) -> list[PlainMessage]:
    messages: list[PlainMessage] = [{"role": "system", "content": "Be brief."}]
    for _ in range(rounds):
        messages.append({"role": "user", "content": "How is the weather?\nAnd tomorrow?"})
        if with_calls:
            calls = [{"type": "function", "id": "call00000", "function": _CALL}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages.append({"role": "tool", "content": "Sunny.", "tool_call_id": "call00000", "name": "search"})
        messages.append({"role": "assistant", "content": "Sunny.", "reasoning_content": "Let me see."})
    messages.append({"role": "user", "content": "Thanks!"})
    return messages
