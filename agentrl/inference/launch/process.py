"""Starts a server process, watches it, and ends it together with its own child processes.

Invariant: no process outlives the block that started it; the message about its end has its exit code and the end of its log.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio.abc import TaskGroup

from agentrl.errors import LaunchError, ServerTimeout, ServerUnavailable
from agentrl.processes.base import HOST_WORD, PORT_WORD, Child, Launcher, ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The start of a server, and the sign that it is ready."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Variables that are added to the environment of the server's node."""
    ready: tuple[re.Pattern[str], ...]
    """The server is ready when each pattern has matched a line of its output; a group 1 is its base URL."""
    url: str
    """The base URL, if no pattern has a group; `HOST_WORD` and `PORT_WORD` are filled in."""
    log_path: Path
    gpus: int = 0
    """GPUs to reserve for it, where the launcher reserves any."""

    @property
    def spec(self) -> ProcessSpec:
        """The process for a launcher to start."""
        return ProcessSpec(
            name=f"inference server {self.log_path.stem}",
            role="server",
            command=self.command,
            environment=self.environment,
            log_path=self.log_path,
            gpus=self.gpus,
        )


class ServerProcess:
    """A server process. One task calls `start` and `stop`, another calls `ended`."""

    def __init__(self, recipe: Recipe, launcher: Launcher) -> None:
        self.recipe = recipe
        self._launcher = launcher
        self._child: Child | None = None

    async def start(self, tasks: TaskGroup, timeout_s: float) -> str:
        """Start the process and return its base URL once it is ready; from then on, a task in `tasks` reads its output."""
        try:
            [child] = await self._launcher.start([self.recipe.spec])
        except LaunchError as error:
            raise ServerUnavailable(str(error)) from error
        self._child = child
        try:
            with anyio.move_on_after(timeout_s):
                output = child.lines()
                url = await self._until_ready(output)
                tasks.start_soon(_drain, output)
                return url
            tail = await child.log_tail()
            raise ServerTimeout(f"{self.named}: not ready after {timeout_s:g} s; its log ends with:\n{tail}")
        except BaseException:
            await self.stop()
            raise

    @property
    def named(self) -> str:
        """The name of the process in messages."""
        where = f"{self._child.where}, " if self._child is not None else ""
        return f"{self.recipe.spec.name} ({where}log {self.recipe.log_path})"

    async def ended(self) -> str:
        """Wait for the process to end by itself, and return a description of its end."""
        assert self._child is not None
        end = await self._child.ended()
        return f"{self.named} ended with {end.reason}; its log ends with:\n{end.log_tail}"

    async def stop(self) -> None:
        """End the process and its children, within 5 seconds, even if cancelled."""
        child, self._child = self._child, None
        if child is not None:
            await child.stop()

    async def _until_ready(self, output: AsyncIterator[str]) -> str:
        """Return the base URL once each pattern has matched a line."""
        assert self._child is not None
        url = self.recipe.url.replace(HOST_WORD, self._child.host).replace(PORT_WORD, str(self._child.port))
        missing = list(self.recipe.ready)
        async for line in output:
            for pattern in tuple(missing):
                if (match := pattern.search(line)) is not None:
                    missing.remove(pattern)
                    url = match[1] if pattern.groups else url
            if not missing:
                return url
        raise ServerUnavailable(await self.ended())


async def _drain(output: AsyncIterator[str]) -> None:
    async for _ in output:  # the log has it
        pass
