"""Many inference servers behind one `Inference`: routing, retries, health checks, weight updates, status.

Invariant: a call ends with a checked `Generation` or a named error within its deadline, whatever the servers do. Every token
that it returns was sampled by the version that the pool had published when the call was made, or by a later one.

Who waits for whom: a call waits for its server; evicting the server ends the wait, and the call goes to another. One task
for each server checks its health every `health_interval_s`, during updates too, and at once when a call failed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

import anyio

from agentrl.errors import (
    ServerError,
    ServerTimeout,
    ServerUnavailable,
    TrainError,
    UpdatePending,
    WeightSyncError,
)
from agentrl.inference.backend import GenerateRequest, Generation
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.ended_episodes import end_sessions
from agentrl.inference.pool.failover import Failover
from agentrl.inference.pool.members import FROZEN_CHECKS, PAUSES, Member, Members, Server, State
from agentrl.inference.pool.transfer import leave_all
from agentrl.inference.pool.update import CLEANUP_S, Updater
from agentrl.support.concurrency import Deadline, task_group


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """A server's state, for progress displays and stall reports."""

    url: str
    state: State
    version: int
    in_flight: int
    """Model calls that wait for it."""
    sessions: int
    """Episodes that use it."""
    paused: bool
    reason: str
    """The reason for not serving; empty where it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """The pool at one moment."""

    version: int
    updating: bool
    in_flight: int
    servers: tuple[ServerStatus, ...]

    def __str__(self) -> str:
        parts = [
            f"{s.url} {s.state}{' paused' if s.paused else ''} v{s.version}, {s.in_flight} in flight"
            + (f" ({s.reason})" if s.reason else "")
            for s in self.servers
        ]
        return f"version {self.version}{', updating weights' if self.updating else ''}: " + "; ".join(parts)


def describe(members: Members, *, updating: bool) -> PoolStatus:
    """Return the status of each server at this moment; nothing in it changes afterwards."""
    return PoolStatus(
        version=members.version,
        updating=updating,
        in_flight=sum(member.in_flight for member in members.all),
        servers=tuple(
            ServerStatus(
                url=member.url,
                state=member.state,
                version=member.server.version,
                in_flight=member.in_flight,
                sessions=member.sessions,
                paused=member.server.paused,
                reason=member.why,
            )
            for member in members.all
        ),
    )


logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class ServerPool:
    """Implements `Inference` over servers; an async context manager that owns their connections and health checks.

    Example:
        servers = [SGLangServer(url, vocab_size=151936) for url in urls]
        async with ServerPool(servers, InferenceConfig()) as pool:
            generation = await pool.generate(request)
    """

    def __init__(self, servers: Sequence[Server], config: InferenceConfig) -> None:
        """Remember one server or more, of different urls; entering the block connects to them."""
        self._config = config
        self._members = Members(servers)
        self._updater = Updater(
            self._members,
            mode=PAUSES[config.pause_mode or "exact"],
            on_failure=config.on_server_failure,
            patience_s=config.control_timeout_s,
            retries=config.request_retries,
        )
        self._failover = Failover(self._members, config, check_health=self._check_health, evict=self._evict)
        self.generate = self._failover.generate
        """Return the completion of a request; raises as `Failover.generate`."""
        self.stream = self._failover.stream
        """Yield the completion of a request as it is sampled; raises as `Failover.stream`."""
        self.give_up = self._failover.give_up
        """Have a call end early with the tokens it has, as `GivesUp.give_up` does."""
        self.update_weights = self._updater.update
        """Change the weights of every server; raises as `Updater.update`."""
        self.release = self._members.release
        """Forget which server an episode used, and end its session there; call it when the episode has ended."""
        self._stack = AsyncExitStack()
        self._context: int | None = None
        """Longest context, tokens, that every server granted when the pool was opened."""
        self._fatal: ServerUnavailable | None = None
        self._failed = anyio.Event()

    async def __aenter__(self) -> ServerPool:
        """Connect to all servers and start the health checks."""
        try:
            await self._connect()
            tasks = await self._stack.enter_async_context(task_group())
            tasks.start_soon(self._stop_when_failed)
            # A task of its own, because `release` is called where nothing may wait.
            tasks.start_soon(end_sessions, self._members)
            for member in self._members.all:
                tasks.start_soon(self._watch, member)
            self._stack.callback(tasks.cancel_scope.cancel)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self._stack.__aexit__(kind, error, None)
            # The user's block fails by the cancellation that the lost server caused; the cause is what the user must
            # read.
            if error is not None and self._fatal is not None:
                raise self._fatal
        except Exception:
            if self._fatal is not None:
                raise self._fatal from None
            raise
        finally:
            await self._close()

    @property
    def policy_version(self) -> int:
        return self._members.version

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output, tokens, that every server grants every call; None where no server reports a limit."""
        limits = [member.server.max_context_tokens for member in self._members.all]
        return min([limit for limit in limits if limit is not None], default=None)

    @property
    def serving(self) -> tuple[str, ...]:
        return tuple(member.url for member in self._members.serving())

    async def sample(self, url: str, request: GenerateRequest) -> Generation:
        """Return the completion of `request` from one server, without another attempt."""
        member = self._members.at(url)
        try:
            return await member.server.generate(request)
        finally:
            self._members.end_session(request.episode_id, member)

    def take_out(self, url: str, reason: str) -> None:
        """Evict a server until its launcher restarts its process; do nothing if that has happened, at another address."""
        with suppress(ServerUnavailable):
            member = self._members.at(url)
            self._evict(member, State.WRONG, reason)
            member.taken_out.set()

    def report_kept(self, url: str, *, kept: bool = True) -> None:
        """Record whether the launcher of a server restarts its process when that ends."""
        member = self._members.at(url)
        member.kept, member.launched = kept, True

    def report_dead(self, url: str, reason: str, *, starting: bool = False, note: str = "") -> None:
        """Evict a server whose process ended; `starting`: its launcher restarts it; `note`: for every later message."""
        member = self._members.at(url)
        member.note, member.launched = note, True
        member.kept = member.ended = starting
        # Not at its start: it may answer, serve and be taken out again before its launcher reports the start.
        member.taken_out = anyio.Event()
        self._evict(member, State.STARTING if starting else State.DEAD, reason)

    def report_started(self, url: str) -> None:
        """Connect to a server now, for the launcher that restarted its process and saw it ready."""
        member = self._members.at(url)
        member.ended, member.silent_since, member.frozen = False, None, anyio.Event()
        member.wake.set()

    async def replace(self, url: str, server: Server) -> None:
        """Let `server` take the place of the evicted one at `url`, for the launcher that started it at another address.

        Cancellation: `server` has the place; the connections of the former may be open.
        """
        member = self._members.at(url)
        former, member.server = member.server, server
        logger.warning("%s takes the place of %s", server.url, former.url)
        await former.aclose()

    async def until_frozen(self, url: str) -> str:
        """Wait until a server has given no answer for `FROZEN_CHECKS` health checks in a row, and return what to say."""
        await self._members.at(url).frozen.wait()
        return f"gave no answer for {FROZEN_CHECKS * self._config.health_interval_s:g} s: it is stopped or hangs"

    async def until_taken_out(self, url: str) -> str:
        """Wait until `take_out` has evicted a server, and return the reason."""
        member = self._members.at(url)
        await member.taken_out.wait()
        return member.reason

    def describe(self) -> PoolStatus:
        return describe(self._members, updating=self._updater.running)

    async def _connect(self) -> None:
        async with task_group() as tasks:
            for member in self._members.all:
                tasks.start_soon(self._first_contact, member)
        answering = self._members.serving()
        missing = len(answering) < len(self._members.all)
        if not answering or (missing and self._config.on_server_failure == "stop"):
            raise ServerUnavailable(f"cannot start without inference servers: {self._members.reasons()}")
        self._context = self.max_context_tokens
        # Servers that others run keep the version of the run before, and one of them may have missed its last update.
        self._members.version = self._members.target = max(member.server.version for member in answering)
        for member in answering:
            if member.server.version != self._members.version:
                self._members.evict(member, State.STUCK, f"has version {member.server.version}; it waits for an update")

    async def _first_contact(self, member: Member) -> None:
        try:
            await member.server.connect()
        except ServerError as error:
            self._members.evict(member, State.DEAD, str(error))
            logger.warning("%s does not answer: %s", member.url, error)
        else:
            self._members.admit(member)

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):  # closes sockets; servers that run on get CLEANUP_S to leave their groups
            await self._stack.aclose()
            # Servers that others run outlive this pool, and would keep their place in a closed group.
            if self._config.urls:
                await leave_all(self._members.all, timeout_s=CLEANUP_S)
            for member in self._members.all:
                await member.server.aclose()

    async def _stop_when_failed(self) -> None:
        await self._failed.wait()
        if self._fatal is not None:
            raise self._fatal

    def _evict(self, member: Member, state: State, reason: str) -> None:
        if member.state is State.SERVING:
            logger.warning("%s is evicted from the pool: %s", member.url, reason)
            if self._config.on_server_failure == "stop":
                self._fatal = ServerUnavailable(
                    f"stopped by inference.on_server_failure: {member.url}: {reason}", url=member.url
                )
                self._failed.set()
            else:
                member.wake.set()
        self._members.evict(member, state, reason)

    async def _watch(self, member: Member) -> None:
        while True:
            with anyio.move_on_after(self._config.health_interval_s):
                await member.wake.wait()
            member.wake = anyio.Event()
            if member.state is State.SERVING:
                await self._check_health(member, patience=FROZEN_CHECKS)
            elif member.state is not State.WRONG and not self._updater.running:  # an update wakes this task at its end
                await self._bring_back(member)

    async def _check_health(self, member: Member, patience: int = 1) -> None:
        """Check a server's version, and evict the server when it does not answer or has another version.

        A server that answers calls meanwhile is busy, and is asked again.
        """
        while member.state is State.SERVING:
            expected, began = self._members.version, anyio.current_time()
            try:
                version = await self._answer(member, member.server.check)
            except ServerTimeout as error:
                # Tokens came while the check waited: the server is busy, and does not use up its patience.
                if member.heard_at >= began:
                    continue
                patience -= 1
                if not patience:
                    self._evict(member, State.DEAD, str(error))
            except ServerError as error:
                if error.url is None:  # this process is to blame: the server may be well
                    logger.warning("%s: no health check: %s", member.url, error)
                    return
                self._evict(member, State.DEAD, str(error))
            else:
                # A version that changed during the check, or an update that runs, makes the comparison meaningless.
                if version != expected == self._members.version and not self._updater.running:
                    self._evict(member, State.BEHIND, f"has version {version}, not {expected}; was it restarted?")
                return

    async def _answer(self, member: Member, ask: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Return the answer to a health check; a server that gives none `FROZEN_CHECKS` times in a row is frozen.

        The start of a check counts: where this process was stopped meanwhile, a single check may end at any later time.
        """
        began, interval_s = anyio.current_time(), self._config.health_interval_s
        try:
            with Deadline(interval_s, lambda: f"{member.url}: the pool waited for its health check", member.url):
                answer = await ask()
        except ServerTimeout:
            if member.heard_at >= began:
                member.silent_since = None
                raise
            member.silent_since = began if member.silent_since is None else member.silent_since
            if began - member.silent_since >= (FROZEN_CHECKS - 1) * interval_s:
                member.frozen.set()
            raise
        except ServerError:
            member.silent_since = None
            raise
        member.silent_since = None
        return answer

    async def _bring_back(self, member: Member) -> None:
        try:
            await self._answer(member, member.server.connect)
            # It answers: the next silence is a new one, for which its launcher waits again.
            if member.frozen.is_set():
                member.frozen = anyio.Event()
            limit = member.server.max_context_tokens
            # Calls were accepted by the limit that held at the start; a smaller server would fail them.
            if limit is not None and limit < (self._context or 0):
                raise WeightSyncError(f"{member.url}: grants a context of {limit} tokens; the pool promised {self._context}")
            if member.state in (State.DEAD, State.STARTING):
                self._members.evict(member, State.BEHIND, "answers again, and gets the current weights")
            await self._updater.catch_up(member)
        except (ServerTimeout, ServerUnavailable) as error:
            self._members.evict(member, State.DEAD, str(error))
        except UpdatePending as error:
            self._members.evict(member, State.WAITING, str(error))
        except (ServerError, WeightSyncError, TrainError) as error:
            self._members.evict(member, State.STUCK, str(error))
        else:
            if member.state is State.SERVING:
                logger.warning("%s serves again, version %d", member.url, self._members.version)
