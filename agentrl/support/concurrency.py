"""Task groups that raise one error, deadlines that name who waited for whom, what episodes wait for, and what they give up.

Invariant: no task outlives the block that started it, and every wait that ends too late raises a message of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus

from agentrl.errors import AgentRLError, ServerTimeout, WorkflowError

STRAY_CANCELLATION = (
    "the run ended early, because a task of agentrl was cancelled with `asyncio.Task.cancel` and not by agentrl; look for a "
    "workflow that cancels tasks which it did not start, such as all of `asyncio.all_tasks()`"
)


def flatten(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside nested exception groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from flatten(inner)
    else:
        yield error


@asynccontextmanager
async def task_group() -> AsyncGenerator[TaskGroup]:
    """Yield a task group; when a task fails, the group cancels the others, and the block raises that error by itself.

    Of several errors the first agentrl error counts, or else the first of all, with the group as its cause. A group that
    holds more than errors, such as a keyboard interrupt, passes unchanged.
    """
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        errors = list(flatten(group))
        if len(errors) == 1:
            raise errors[0] from errors[0].__cause__
        if not isinstance(group, ExceptionGroup):
            raise
        raise next((error for error in errors if isinstance(error, AgentRLError)), errors[0]) from group


@asynccontextmanager
async def stray_cancellation_raises(error: Callable[[], AgentRLError]) -> AsyncGenerator[None]:
    """Raise `error()` if code that owns no scope of this task cancelled the task, with `asyncio.Task.cancel`.

    A task group ends without an error when that happens to one of its tasks.
    """
    try:
        yield
        if _num_strays():
            await anyio.lowlevel.cancel_shielded_checkpoint()  # delivers what the block left pending
    except anyio.get_cancelled_exc_class() as cancelled:
        if not _num_strays():
            raise
        raise error() from cancelled
    finally:
        while _num_strays():
            asyncio.current_task().uncancel()  # pyright: ignore[reportOptionalMemberAccess] - in a task, which has strays


def _num_strays() -> int:
    """Return how often `Task.cancel` was called on this task, while no scope around it is cancelled."""
    if anyio.current_effective_deadline() == -math.inf:
        return 0
    try:
        task = asyncio.current_task()
    except RuntimeError:  # trio, where only scopes cancel
        return 0
    return 0 if task is None else task.cancelling()


def ending_quietly(error: Exception) -> BaseException:
    """Return what ends a task that nobody waits for: a cancellation, or `error` where only a scope can make one (trio)."""
    return asyncio.CancelledError() if anyio.get_cancelled_exc_class() is asyncio.CancelledError else error


@asynccontextmanager
async def noticing_cancellation(notice: Callable[[], None]) -> AsyncGenerator[None]:
    """Call `notice` as soon as a scope around the block is cancelled, while the block may still clean up."""
    async with task_group() as tasks:
        done = False

        async def wait_for_cancellation() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                if not done:
                    notice()

        tasks.start_soon(wait_for_cancellation)
        try:
            yield
        finally:
            done = True
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def finishing(seconds: float, on_cancel: Callable[[], None]) -> AsyncGenerator[None]:
    """On cancellation, call `on_cancel`, let the block run on for `seconds` at most, and cancel it then."""
    async with task_group() as tasks:
        block = anyio.CancelScope(shield=True)
        done = False

        async def wait_for_cancellation() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                if not done:
                    block.deadline = anyio.current_time() + seconds
                    on_cancel()

        tasks.start_soon(wait_for_cancellation)
        try:
            with block:
                yield
        finally:
            done = True
            tasks.cancel_scope.cancel()
    await anyio.lowlevel.checkpoint_if_cancelled()


class Deadline:
    """Bounds one block, with a ServerTimeout. `call_off` ends it at its next await, without an error if there is time."""

    __slots__ = ("_message", "_scope", "_seconds", "_url", "_waits", "call_off")

    def __init__(
        self, seconds: float, message: Callable[[], str], url: str | None = None, *, since: float | None = None
    ) -> None:
        """`message` says who waited for whom; `since` is a start by `anyio.current_time()`; None: now."""
        self._seconds, self._message, self._url = seconds, message, url
        self._scope = anyio.CancelScope(deadline=(anyio.current_time() if since is None else since) + seconds)
        self.call_off: Callable[[], None] = self._scope.cancel
        self._waits: set[Deadline] = set()

    def join(self, waits: set[Deadline]) -> None:
        """Enter `waits`, and leave any other set, until the end of the block."""
        self._waits.discard(self)
        self._waits = waits
        waits.add(self)

    def __enter__(self) -> Self:
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._waits.discard(self)
        done = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught and anyio.current_time() >= self._scope.deadline:
            raise ServerTimeout(f"{self._message()} (deadline {self._seconds:g} s)", url=self._url)
        return done


First = TypeVar("First")
Second = TypeVar("Second")


class SharedContext:
    """A context that blocks inside a block share: the outermost one opens and closes it."""

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[None]], name: str) -> None:
        self._opening, self._name = opening, name
        self._is_held = False

    @asynccontextmanager
    async def block(self) -> AsyncGenerator[None]:
        """Hold the context open; a WorkflowError if a block that is not around this one holds it."""
        around = _open_around.get()
        if self in around and self._is_held:
            yield
            return
        if self._is_held:
            raise WorkflowError(
                f"{self._name} is open in another task, which would close it under this one; open it once around both: "
                f"`async with workflow.opened():`"
            )
        self._is_held = True
        try:
            async with self._opening():
                _open_around.set((*around, self))
                try:
                    yield
                finally:
                    _open_around.set(around)
        finally:
            self._is_held = False


_open_around: ContextVar[tuple[SharedContext, ...]] = ContextVar("agentrl_open_around", default=())


class Pair(NamedTuple, Generic[First, Second]):
    """The values of two context managers."""

    first: First
    second: Second


@asynccontextmanager
async def enter_both(
    first: AbstractAsyncContextManager[First], second: AbstractAsyncContextManager[Second]
) -> AsyncGenerator[Pair[First, Second], None]:
    """Enter two context managers concurrently and yield their values; each is left in the task that entered it.

    A failure of one ends the other; of several errors, agentrl's come first.
    """
    values: dict[int, Any] = {}
    leave = anyio.Event()

    async def hold(index: int, manager: AbstractAsyncContextManager[object], *, task_status: TaskStatus[None]) -> None:
        async with manager as values[index]:
            task_status.started()
            await leave.wait()

    async with task_group() as holders:
        async with anyio.create_task_group() as starters:
            for index, manager in enumerate((first, second)):
                starters.start_soon(holders.start, hold, index, manager)
        try:
            yield Pair(values[0], values[1])
        finally:
            leave.set()


class OutsideWork:
    """The waits of one episode outside the policy: for tools, environments, sandboxes, graders and judges.

    Work counts for the episode that began it, in all its tasks and threads. Waits of a workflow's own code are not seen.
    """

    def __init__(self, deadline: float) -> None:
        self.begun_s = -math.inf
        """`time.perf_counter` when the last work began."""
        self._deadline = deadline
        self._running = 0
        self._overran = False

    @property
    def ran_into_deadline(self) -> bool:
        """Whether work that began before the deadline, which has passed, ended at the deadline or later, or still runs."""
        return self._running > 0 or self._overran

    @contextmanager
    def counted(self) -> Generator[None]:
        self._running += 1
        self.begun_s = time.perf_counter()
        is_early = loop_time() < self._deadline  # what closes a resource after the deadline is not
        try:
            yield
        finally:
            self._running -= 1
            self._overran |= is_early and loop_time() >= self._deadline


_work: ContextVar[OutsideWork | None] = ContextVar("agentrl_outside_work", default=None)


@contextmanager
def watch_outside_work(deadline: float) -> Generator[OutsideWork]:
    """Yield the outside work of the block, and of the tasks and threads that it starts; `deadline` is the episode's."""
    work = OutsideWork(deadline)
    token = _work.set(work)
    try:
        yield work
    finally:
        _work.reset(token)


@contextmanager
def outside_work() -> Generator[None]:
    """Count the block as outside work of the running episode, where there is one."""
    work = _work.get()
    if work is None:
        yield
        return
    with work.counted():
        yield


def loop_time() -> float:
    """Return `anyio.current_time()`; in a thread without an event loop, a time before all others."""
    try:
        return anyio.current_time()
    except RuntimeError:
        return -math.inf


GIVE_UP_S: Final = 30.0
"""Seconds that a server has to end a call that is given up; one that answers takes a step of its sampling."""
_ASK_AGAIN_S: Final = 2.0
"""Seconds after which the server is asked again: it ignores what overtakes the call itself."""


class EndOfEpisode:
    """The end of an episode by the engine, which cuts the waits for calls that were given up."""

    def __init__(self) -> None:
        self.has_come = False
        self._waits: set[anyio.CancelScope] = set()

    def come(self) -> None:
        """Cut all waits, and allow no more."""
        self.has_come = True
        for wait in self._waits:
            wait.cancel()

    @contextmanager
    def bounded(self) -> Generator[None]:
        """Shield a wait; it ends after `GIVE_UP_S`, or with the episode."""
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + GIVE_UP_S) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)


class _Outcome(Generic[First]):
    """What a call returned or raised."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.scope = anyio.CancelScope(shield=True)
        self.results: list[First] = []
        self.error: Exception | None = None

    async def run(self, call: Callable[[], Awaitable[First]]) -> None:
        try:
            with self.scope:
                self.results.append(await call())
        except Exception as error:  # noqa: BLE001 - raised where the call is waited for
            self.error = error
        self.done.set()


async def outcome_of(
    call: Callable[[], Awaitable[First]],
    *,
    give_up: Callable[[], Awaitable[None]],
    end: EndOfEpisode,
    late: Callable[[First | None], None],
) -> First:
    """Return what `call` returns. It runs in a task of its own, which no cancellation of the caller reaches.

    Cancellation: `give_up` makes `call` return early, and `late` takes what it returns; None where it failed, or did not
    return in time. Neither is called if the episode ends.
    """
    outcome = _Outcome[First]()
    async with task_group() as tasks:
        tasks.start_soon(outcome.run, call)
        try:
            await outcome.done.wait()
        except anyio.get_cancelled_exc_class():
            if not end.has_come:
                with end.bounded():
                    await _ask_until(outcome.done, give_up)
                if not end.has_come:
                    late(outcome.results[0] if outcome.results else None)
            raise
        finally:
            outcome.scope.cancel()
    if outcome.error is not None:
        raise outcome.error
    return outcome.results[0]


async def _ask_until(done: anyio.Event, give_up: Callable[[], Awaitable[None]]) -> None:
    while not done.is_set():
        with anyio.move_on_after(_ASK_AGAIN_S):
            await give_up()
            await done.wait()
