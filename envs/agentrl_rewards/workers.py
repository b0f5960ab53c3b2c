"""Grading functions in worker processes with hard limits, next to the event loop.

Invariant: a job ends with the function's value, with a limit that its own work has spent (CPU time or memory, whatever the
load of the machine), or as an `EnvironmentFault`. A worker that hangs or dies is ended and replaced.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

from pydantic import Field

from agentrl.config.base import Config
from agentrl.env import environment_boundary
from agentrl.episode.tape import ask
from agentrl.errors import EnvironmentFault
from agentrl.processes.jobs import WorkerLost, WorkerPool, WorkerReply, WorkerSettings
from agentrl.types import JsonValue

_ATTEMPTS = 2


class GraderLimits(Config):
    """The limits of one job."""

    cpu_s: float = Field(default=2.0, gt=0)
    """CPU seconds of a job; it does not count while the machine does other work, so a job ends alike under any load."""
    memory_mb: int = Field(default=2048, ge=256)
    """Address space of a worker, in MiB. Python with sympy takes about 300 of it."""
    wall_s: float = Field(default=60.0, gt=0)
    """Seconds after which a job that has not spent its CPU time hangs, which is the machine's or the grader's fault."""
    start_s: float = Field(default=120.0, gt=0)
    """Seconds that a worker has to import the function."""


class ClosedAtEnd(ABC):
    """Closes itself at the end of an `async with` block."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End the workers. Without this they end when the object is garbage or the program ends."""


class GraderPool(ClosedAtEnd):
    """Processes that run one grading function; they start when they are needed.

    Args:
        loader: `module:name` of a function without arguments that returns the grading function, called once in each worker.
            Arguments and value of the grading function are JSON.
        num_workers: processes at most; further jobs wait, which counts as no job's time.
        limits: of each job.

    Example:
        async with GraderPool("my_project.graders:load_checker", num_workers=4) as graders:
            reply = await graders.call(answer, reference)
    """

    def __init__(self, loader: str, *, num_workers: int = 2, limits: GraderLimits | None = None) -> None:
        self._name = f"grader {loader}"
        self._limits = limits or GraderLimits()
        settings = WorkerSettings(
            loader=loader,
            name=self._name,
            cpu_s=self._limits.cpu_s,
            memory_mb=self._limits.memory_mb,
            start_s=self._limits.start_s,
        )
        self._pool = WorkerPool(settings, num_workers=num_workers)

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    async def call(self, *arguments: JsonValue) -> WorkerReply:
        """Run one job and return its value; a job whose worker hangs or dies runs once more, in a new worker."""
        with environment_boundary(self._name):
            verdict = cast(
                "dict[str, Any]", await ask("grader", self._name, arguments, lambda: self._ask_workers(arguments))
            )
            return WorkerReply(value=verdict["value"], limit=verdict["limit"])

    async def _ask_workers(self, arguments: Sequence[JsonValue]) -> Mapping[str, JsonValue]:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                reply = await self._pool.run(*arguments, wall_s=self._limits.wall_s, in_new_worker=attempt > 1)
            except WorkerLost as error:
                if attempt == _ATTEMPTS:
                    raise EnvironmentFault(f"{self._name}: {error}; tried {_ATTEMPTS} times") from None
            else:
                return {"value": reply.value, "limit": reply.limit}
        raise AssertionError("unreachable")
