"""Instances of an environment for many episodes: a limited number, kept warm, replaced when they fail.

Invariant: an instance plays one episode at a time. An instance that raised, was late, or was cancelled during a call is
never used again. One task makes and closes it, as libraries with task groups need it. A taped episode has no instance.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import fields
from typing import Any, Self, TypeAlias, cast

import anyio
from anyio.abc import TaskGroup, TaskStatus
from pydantic import BaseModel

from agentrl.env.chat import ChatEnvironment, ChatEpisode, ChatStart, ChatStep, EnvironmentLimits, EpisodeEnd
from agentrl.env.faults import environment_boundary
from agentrl.episode.tape import Player, Recorder, playing, recording
from agentrl.errors import AgentRLError, ConfigError, EnvironmentFault
from agentrl.support.concurrency import task_group
from agentrl.support.user_code import boundary
from agentrl.types import Message, Task

_Made: TypeAlias = ChatEnvironment | AbstractAsyncContextManager[ChatEnvironment]
EnvironmentFactory: TypeAlias = Callable[[], _Made | Awaitable[_Made]]
"""Makes an instance, at once or awaited: an environment, or a context manager that yields one and closes it itself."""
_RESET_ATTEMPTS = 2


class EnvironmentPool:
    """Serves episodes of one kind of environment.

    In an `async with` block the instances of finished episodes are kept and play further ones. Outside of one, every episode
    has a new instance.

    Args:
        factory: makes an instance.
        name: of the environment, in messages.
        size: instances at most; further episodes wait for a free one.
        warm: instances that are made when the block begins.
        max_episodes: episodes of one instance before it is replaced; None: no limit.
        limits: deadlines and sizes.

    Example:
        async with EnvironmentPool(Browser, name="browser", size=4, warm=4) as pool:
            async with pool.episode(task, seed=7) as episode:
                step = await episode.step({"role": "assistant", "content": "..."})
    """

    def __init__(
        self,
        factory: EnvironmentFactory,
        *,
        name: str,
        size: int = 64,
        warm: int = 0,
        max_episodes: int | None = None,
        limits: EnvironmentLimits | None = None,
    ) -> None:
        if size < 1 or not 0 <= warm <= size or (max_episodes is not None and max_episodes < 1):
            raise ConfigError(
                f"environment {name}: size must be at least 1, warm from 0 to size, and max_episodes at least 1; got size "
                f"{size}, warm {warm}, max_episodes {max_episodes}"
            )
        self.name = name
        self.num_started = 0
        self.num_faults = 0
        """Instances that could not be made, or were closed because they failed."""
        self._factory = factory
        self._warm = warm
        self._max_episodes = math.inf if max_episodes is None else max_episodes
        self._limits = limits or EnvironmentLimits()
        self._places = anyio.Semaphore(size)
        self._idle: list[_Instance] = []
        self._tasks: TaskGroup | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(task_group())
        for _ in range(self._warm):
            self._tasks.start_soon(self._start_warm, self._tasks)
        return self

    async def __aexit__(self, *details: object) -> bool | None:
        self._tasks = None
        while self._idle:
            self._idle.pop().retired.set()
        return await self._stack.__aexit__(*cast("tuple[None, None, None]", details))

    @asynccontextmanager
    async def episode(self, task: Task, *, seed: int) -> AsyncGenerator[ChatEpisode]:
        """Begin an episode on a free instance and yield it; its deadlines do not include the wait for the instance.

        An instance that cannot begin the episode is replaced once; two are an EnvironmentFault.

        Cancellation: an instance that was in the middle of a call is closed, within `close_s`.
        """
        if (tape := playing("environment")) is not None:
            recorded = ChatEpisode(TapedEnvironment(tape, self.name), self.name, self._limits)
            await recorded.reset(task, seed=seed)
            yield recorded
            return
        async with self._places, AsyncExitStack() as stack:
            pooled = self._tasks
            tasks = pooled if pooled is not None else await stack.enter_async_context(task_group())
            instance, episode = await self._begin(task, seed, tasks)
            try:
                yield episode
            finally:
                if pooled is None or pooled is not self._tasks:
                    instance.retired.set()
                else:
                    self._give_back(instance, episode)

    async def _begin(self, task: Task, seed: int, tasks: TaskGroup) -> tuple[_Instance, ChatEpisode]:
        for attempt in range(1, _RESET_ATTEMPTS + 1):
            instance = await self._take(tasks)
            episode = ChatEpisode(recorded_environment(instance.environment, self.name), self.name, self._limits)
            try:
                await episode.reset(task, seed=seed)
            except EnvironmentFault:
                self.num_faults += 1
                instance.retired.set()
                if attempt == _RESET_ATTEMPTS:
                    raise
            except BaseException:
                instance.retired.set()
                raise
            else:
                instance.num_episodes += 1
                return instance, episode
        raise AssertionError("unreachable")

    async def _take(self, tasks: TaskGroup) -> _Instance:
        """Return an idle instance that says it is well, or a new one."""
        while self._idle:
            instance = self._idle.pop()
            if instance.has_ended:
                continue
            try:
                await ChatEpisode(instance.environment, self.name, self._limits).check_health()
            except EnvironmentFault:
                self.num_faults += 1
                instance.retired.set()
                with environment_boundary(f"{self.name}.check_health"):
                    pass  # the instance is replaced, so its fault is not the episode's
                continue
            except BaseException:
                instance.retired.set()
                raise
            return instance
        return await self._start(tasks)

    async def _start(self, tasks: TaskGroup) -> _Instance:
        try:
            with environment_boundary(f"{self.name}.start"):
                return await tasks.start(self._host)
        except EnvironmentFault:
            self.num_faults += 1
            raise

    async def _start_warm(self, tasks: TaskGroup) -> None:
        try:
            instance = await self._start(tasks)
        except EnvironmentFault:
            return  # it is counted; the first episode makes an instance, and fails if that fails as well
        if self._tasks is None:
            instance.retired.set()
        else:
            self._idle.append(instance)

    def _give_back(self, instance: _Instance, episode: ChatEpisode) -> None:
        if not episode.is_sound:
            self.num_faults += 1
        if episode.is_sound and not instance.has_ended and instance.num_episodes < self._max_episodes:
            self._idle.append(instance)
        else:
            instance.retired.set()

    async def _host(self, *, task_status: TaskStatus[_Instance]) -> None:
        limits, where = self._limits, f"{self.name}.start"
        instance: _Instance | None = None
        with anyio.CancelScope(deadline=anyio.current_time() + limits.start_s) as scope:
            try:
                with boundary(EnvironmentFault, where):
                    async with self._made() as environment:
                        instance = _Instance(environment)
                        self.num_started += 1
                        scope.deadline, scope.shield = math.inf, True  # only `retired` ends it, so that it can close
                        task_status.started(instance)
                        await instance.retired.wait()
                        scope.deadline = anyio.current_time() + limits.close_s
            except AgentRLError:
                if instance is None:
                    raise
                self.num_faults += 1  # it died by itself, or failed to close
        if instance is None:
            raise EnvironmentFault(f"{where}: no instance within {limits.start_s:g} s")
        instance.has_ended = True

    @asynccontextmanager
    async def _made(self) -> AsyncGenerator[ChatEnvironment]:
        made = self._factory()
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, AbstractAsyncContextManager):
            async with made as environment:
                yield environment
            return
        try:
            yield made
        finally:
            with anyio.move_on_after(self._limits.close_s, shield=True):
                await made.close()


class _Instance:
    """One environment of a pool."""

    def __init__(self, environment: ChatEnvironment) -> None:
        self.environment = environment
        self.num_episodes = 0
        self.retired = anyio.Event()
        self.has_ended = False


def recorded_environment(environment: ChatEnvironment, name: str) -> ChatEnvironment:
    """Return the environment, or one that records it as `name` where the episode has a tape that records."""
    tape = recording()
    return environment if tape is None else _RecordedEnvironment(environment, name, tape)


class _RecordedEnvironment:
    def __init__(self, environment: ChatEnvironment, name: str, tape: Recorder) -> None:
        self._environment, self._name, self._tape = environment, name, tape

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        start = await self._environment.reset(task, seed=seed)
        self._tape.add("environment", f"{self._name}.reset", _beginning(task, seed), _recorded_fields(start))
        return start

    async def step(self, message: Message) -> ChatStep:
        where, question = f"{self._name}.step", _answered(message)
        try:
            step = await self._environment.step(message)
        except Exception as error:
            self._tape.add("environment", where, question, fault=f"{where} raised {type(error).__name__}: {error}")
            raise
        self._tape.add("environment", where, question, _recorded_fields(step))
        return step

    async def close(self) -> None:
        await self._environment.close()


class TapedEnvironment:
    """A chat environment that gives what was recorded."""

    def __init__(self, tape: Player, name: str) -> None:
        self._tape = tape
        self._name = name

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        return ChatStart(**self._take("reset", _beginning(task, seed)))

    async def step(self, message: Message) -> ChatStep:
        recorded = self._take("step", _answered(message))
        end = recorded.pop("end")
        return ChatStep(**recorded, end=None if end is None else EpisodeEnd(end))

    async def close(self) -> None:
        """Do nothing."""

    def _take(self, what: str, question: object) -> dict[str, Any]:
        return dict(cast("Mapping[str, Any]", self._tape.take("environment", f"{self._name}.{what}", question)))


def _beginning(task: Task, seed: int) -> object:
    return {"task": task.id, "seed": seed}


def _recorded_fields(answer: ChatStart | ChatStep) -> dict[str, Any]:
    return {field.name: getattr(answer, field.name) for field in fields(answer)}


def _answered(message: object) -> object:
    """Return the parts of an assistant message that an environment can act on."""
    plain = message.model_dump() if isinstance(message, BaseModel) else cast("Message", message)
    calls: list[dict[str, Any]] = []
    for call in plain.get("tool_calls") or ():
        function = (call.model_dump() if isinstance(call, BaseModel) else call)["function"]
        calls.append({"name": function["name"], "arguments": function["arguments"]})
    return {"content": plain.get("content") or "", "tool_calls": calls}
