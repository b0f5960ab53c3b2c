"""Many inference servers behind one `Inference`: routing, retries, liveness, weight updates.

Invariant: a call ends with a checked `Generation` or a named error within its deadline, whatever the servers do; every
token it returns was sampled by a version the pool had published when the call was made, or by a later one.

Who waits for what: a call waits for its server; when the server is found dead, the wait is cancelled and the call goes
elsewhere. One task for each server asks it for a sign of life every `health_interval_s`, at once when a call failed.

What the servers of a pool are doing, for progress displays and stall reports.

Invariant: a status is of one moment; nothing in it changes afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio

from agentrl.concurrency import Deadline, task_group
from agentrl.errors import AgentRLError, ServerError, ServerTimeout, ServerUnavailable, TrainError, WeightSyncError
from agentrl.inference.backend import GenerateRequest, Generation, GenerationChunk, Probe, UpdateReport, WeightSource
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool.delivery import leave_all
from agentrl.inference.pool.failover import Failover, PoolStream
from agentrl.inference.pool.members import PAUSES, Member, Roster, Server, State
from agentrl.inference.pool.update import CLEANUP_S, Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """One server, for progress displays and stall reports."""

    url: str
    state: State
    version: int
    in_flight: int
    """Model calls that wait for it."""
    sessions: int
    """Episodes at home on it."""
    paused: bool
    reason: str
    """Why it does not serve; empty where it does."""


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


def describe(roster: Roster, *, updating: bool) -> PoolStatus:
    """Return what each server of a roster is doing now, `updating` their weights or not."""
    return PoolStatus(
        version=roster.version,
        updating=updating,
        in_flight=sum(member.in_flight for member in roster.members),
        servers=tuple(
            ServerStatus(
                url=member.url,
                state=member.state,
                version=member.server.version,
                in_flight=member.in_flight,
                sessions=member.sessions,
                paused=member.server.paused,
                reason=member.reason,
            )
            for member in roster.members
        ),
    )


logger = logging.getLogger(__name__)


class ServerPool:
    """Implements `Inference` over servers; an async context manager that owns their connections and health checks.

    Example:
        servers = [SGLangServer(url, vocab_size=151936) for url in urls]
        async with ServerPool(servers, InferenceConfig()) as pool:
            generation = await pool.generate(request)
    """

    def __init__(self, servers: Sequence[Server], config: InferenceConfig) -> None:
        """Remember the servers; entering the block connects to them.

        Args:
            servers: at least one, with different urls.
            config: deadlines, retries, and what to do about failures.
        """
        self._config = config
        self._roster = Roster(servers)
        self._updater = Updater(self._roster, mode=PAUSES[config.pause_mode], on_failure=config.on_server_failure)
        self._failover = Failover(self._roster, config, suspect=self._suspect, lose=self._lose)
        self._stack = AsyncExitStack()
        self._context: int | None = None
        """What calls may have, by the servers that were there at the start."""
        self._fatal: ServerUnavailable | None = None
        self._failed = anyio.Event()

    async def __aenter__(self) -> ServerPool:
        """Connect to all servers and start the health checks.

        Raises:
            ServerUnavailable: when no server, or by policy not every server, answers; names each and why.

        Cancellation: all connections are closed.
        """
        try:
            await self._connect()
            tasks = await self._stack.enter_async_context(task_group())
            tasks.start_soon(self._stop_when_failed)
            for member in self._roster.members:
                tasks.start_soon(self._watch, member)
            self._stack.callback(tasks.cancel_scope.cancel)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Stop the health checks and close all connections."""
        try:
            await self._stack.__aexit__(kind, error, None)
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
        """The version of every server that serves."""
        return self._roster.version

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output that every server is sure to give a call; None where no server tells."""
        limits = [member.server.max_context_tokens for member in self._roster.members]
        return min([limit for limit in limits if limit is not None], default=None)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return the completion of `request`, from the server its episode is at home on, or another if that one fails.

        Raises:
            ServerUnavailable: all attempts failed, or no server is left; says which servers and why.
            ServerTimeout, RequestRejected, ReplyError: as for one server, without another attempt.

        Cancellation: the request is aborted at the server; nothing of it is returned.
        """
        return await self._failover.generate(request)

    @asynccontextmanager
    async def stream(self, request: GenerateRequest) -> AsyncGenerator[AsyncIterator[GenerationChunk], None]:
        """Yield the completion of `request` as it is sampled; other servers are tried until the first chunk is out.

        Raises:
            ServerError: as for `generate`.

        Cancellation: the request is aborted at the server, also when the block is left early.
        """
        chunks = PoolStream(self._failover, request)
        try:
            yield chunks
        finally:
            await chunks.aclose()

    def release(self, episode_id: str) -> None:
        """Forget where an episode is at home; call it when the episode has ended."""
        self._roster.release(episode_id)

    async def update_weights(self, source: WeightSource, probe: Probe | None = None) -> UpdateReport:
        """Pause, load, verify and continue on every server; see `Inference.update_weights`.

        Raises:
            WeightSyncError: when no server, or by policy not every server, holds exactly the published weights; when the
                probe's log-probs differ from the trainer's by more than its tolerance; for a version below the current one.

        Cancellation: servers that were paused are continued within `update.CLEANUP_S`; those that have the new weights
            serve, the others are brought up to them.
        """
        report = await self._updater.update(source, probe)
        for member in self._roster.members:
            if member.url in report.evicted:
                logger.warning("update to version %d goes on without %s: %s", report.version, member.url, member.reason)
        return report

    def report_kept(self, url: str, *, kept: bool = True) -> None:
        """Count on a server's return when its process ends, or no longer; for whoever starts it again then."""
        for member in self._roster.members:
            if member.url == url.rstrip("/"):
                member.kept = kept

    def report_dead(self, url: str, reason: str, *, starting: bool = False) -> None:
        """Take a server out at once; for whoever launched it, saw its process end, and is `starting` it again or not."""
        for member in self._roster.members:
            if member.url == url.rstrip("/"):
                member.kept = member.ended = starting
                self._lose(member, State.STARTING if starting else State.DEAD, reason)

    def report_started(self, url: str) -> None:
        """Ask a server now what it is; for whoever started its process again and saw it ready."""
        for member in self._roster.members:
            if member.url == url.rstrip("/"):
                member.ended = False
                member.wake.set()

    def describe(self) -> PoolStatus:
        """Return what each server is doing now."""
        return describe(self._roster, updating=self._updater.running)

    async def _connect(self) -> None:
        async with task_group() as tasks:
            for member in self._roster.members:
                tasks.start_soon(self._first_contact, member)
        answering = self._roster.serving()
        missing = len(answering) < len(self._roster.members)
        if not answering or (missing and self._config.on_server_failure == "stop"):
            raise ServerUnavailable(f"cannot start without inference servers: {self._roster.reasons()}")
        self._context = self.max_context_tokens
        self._roster.version = self._roster.target = max(member.server.version for member in answering)
        for member in answering:
            if member.server.version != self._roster.version:
                self._roster.evict(member, State.STUCK, f"has version {member.server.version}; waits for an update")

    async def _first_contact(self, member: Member) -> None:
        try:
            await member.server.connect()
        except ServerError as error:
            self._roster.evict(member, State.DEAD, str(error))
            logger.warning("%s does not answer: %s", member.url, error)
        else:
            self._roster.admit(member)

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):  # closes sockets; servers that run on get CLEANUP_S to leave their groups
            await self._stack.aclose()
            if self._config.urls:
                await leave_all(self._roster.members, timeout_s=CLEANUP_S)
            for member in self._roster.members:
                await member.server.aclose()

    async def _stop_when_failed(self) -> None:
        await self._failed.wait()
        if self._fatal is not None:
            raise self._fatal

    def _lose(self, member: Member, state: State, reason: str) -> None:
        if member.state is State.SERVING:
            logger.warning("%s is out of the pool: %s", member.url, reason)
            if self._config.on_server_failure == "stop":
                self._fatal = ServerUnavailable(
                    f"stopped, as on_server_failure says: {member.url}: {reason}", url=member.url
                )
                self._failed.set()
            else:
                member.wake.set()
        self._roster.evict(member, state, reason)

    async def _watch(self, member: Member) -> None:
        while True:
            with anyio.move_on_after(self._config.health_interval_s):
                await member.wake.wait()
            member.wake = anyio.Event()
            if self._updater.running:
                continue  # an update has its own deadlines, and wakes this task when it leaves the server behind
            if member.state is State.SERVING:
                await self._suspect(member, patience=2)
            else:
                await self._bring_back(member)

    async def _suspect(self, member: Member, patience: int = 1) -> None:
        """Ask a server for a sign of life, and take it out when there is none."""
        while member.state is State.SERVING:
            try:
                with Deadline(self._config.health_interval_s, lambda: f"{member.url}: no sign of life", member.url):
                    version = await member.server.check()
            except ServerTimeout as error:
                patience -= 1
                if not patience:
                    self._lose(member, State.DEAD, str(error))
            except ServerError as error:
                self._lose(member, State.DEAD, str(error))
            else:
                if version != self._roster.version and not self._updater.running:
                    expected = self._roster.version
                    self._lose(member, State.BEHIND, f"has version {version}, not {expected}; was it restarted?")
                return

    async def _bring_back(self, member: Member) -> None:
        try:
            with Deadline(self._config.health_interval_s, lambda: f"{member.url}: no sign of life", member.url):
                await member.server.connect()
            limit = member.server.max_context_tokens
            if limit is not None and limit < (self._context or 0):
                raise WeightSyncError(f"{member.url}: takes a context of {limit} tokens; calls may have {self._context}")
            if member.state in (State.DEAD, State.STARTING):
                self._roster.evict(member, State.BEHIND, "answers again; is being given the current weights")
            await self._updater.catch_up(member)
        except (ServerTimeout, ServerUnavailable) as error:
            self._roster.evict(member, State.DEAD, str(error))
        except AgentRLError as error:
            if not isinstance(error, (ServerError, WeightSyncError, TrainError)):
                raise
            self._roster.evict(member, State.STUCK, str(error))
        else:
            if member.state is State.SERVING:
                logger.warning("%s serves again, version %d", member.url, self._roster.version)
