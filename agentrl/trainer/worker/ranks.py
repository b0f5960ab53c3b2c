"""The ranks of one trainer, as the driver sees them: their start, the first end or silence, and the end of all.

Invariant: where one rank ends, all end within `CAUSE_S + RANK_KILL_S` seconds, and the report names the cause: a rank whose
connection to another one breaks may be heard of before that one. A rank that is silent for `lost_s` of a request ends all.
"""

from __future__ import annotations

import fcntl
import logging
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread

from agentrl.errors import InvariantError
from agentrl.processes.base import Launcher, ProcessSpec
from agentrl.processes.config import ClusterConfig
from agentrl.processes.link import SILENT_S, STREAM_ENDS, Link, LinkEnd, Silences, SilenceWords
from agentrl.processes.machine import LOOPBACK, interface_of
from agentrl.processes.start import attached_links, launched_links, local_links
from agentrl.support.concurrency import task_group
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker import protocol
from agentrl.trainer.worker.place import RankPlace

logger = logging.getLogger(__name__)
QUIT_S = 2.0
"""Seconds that idle ranks get to end by themselves after they were dismissed."""
RANK_KILL_S = 2.0
"""Seconds that a killed rank gets to end."""
CAUSE_S = 1.0
"""Seconds after the error of one rank in which another may turn out to be its cause."""
_LOST_ANOTHER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "ncclRemoteError",
    "Socket Timeout",
)
"""Messages of gloo, NCCL and their store in a rank that has lost another one."""
WORKER_MODULE = "agentrl.trainer.worker.process"


class TrainerRanks:
    """The ranks of one trainer; the first speaks to the driver."""

    def __init__(
        self,
        ranks: Sequence[Link],
        *,
        silent_s: float = SILENT_S,
        lost_s: float | None = None,
        grace_s: float = CAUSE_S,
    ) -> None:
        self.ranks = ranks
        words = SilenceWords(
            names=[f"rank {number}" for number in range(len(ranks))] if len(ranks) > 1 else ["worker"],
            owner="the trainer",
            request_field="trainer.call_timeout_s",
            silence_field="trainer.collective_timeout_s",
        )
        self.silences = Silences(ranks, words, silent_s=silent_s, lost_s=lost_s, on_lost=self._lose)
        self._grace_s = grace_s
        self._ended = anyio.Event()
        self._died = anyio.Event()
        self._ends: dict[int, LinkEnd] = {}
        """The first report about each rank, in the order of the reports."""
        self._found = anyio.Event()
        self._first_death: str | None = None
        self._ending = False

    @property
    def first(self) -> Link:
        return self.ranks[0]

    @property
    def others(self) -> Sequence[Link]:
        return self.ranks[1:]

    @classmethod
    @asynccontextmanager
    async def watching(
        cls,
        ranks: Sequence[Link],
        *,
        silent_s: float = SILENT_S,
        lost_s: float | None = None,
        grace_s: float = CAUSE_S,
    ) -> AsyncGenerator[Self]:
        """Watch `ranks`, rank 0 first, while the block runs; when one ends, all are killed.

        A silent rank is reported after `silent_s` seconds and lost after `lost_s` of a request (None: never). Within
        `grace_s` of the error of one rank another may turn out to be its cause.
        """
        processes = cls(ranks, silent_s=silent_s, lost_s=lost_s, grace_s=grace_s)
        async with task_group() as watching:
            watching.start_soon(processes._judge)
            for number in range(len(ranks)):
                watching.start_soon(processes._watch, number)
                watching.start_soon(processes.silences.follow, number)
                if number:
                    watching.start_soon(processes._listen, number)
            try:
                yield processes
            finally:
                processes._ending = True
                watching.cancel_scope.cancel()

    async def _watch(self, number: int) -> None:
        self.report_end(number, await self.ranks[number].ended())

    async def _listen(self, number: int) -> None:
        """Read a rank other than 0, which sends nothing but heartbeats and its last words."""
        link = self.ranks[number]
        link.limit(protocol.MAX_LAST_WORDS)
        with suppress(*STREAM_ENDS):  # `_watch` reports the end
            self.report_end(number, LinkEnd(reason=await _last_words(link), was_killed=False))

    def _lose(self, number: int, reason: str) -> None:
        self.report_end(number, LinkEnd(reason=reason, was_killed=True, is_lost=True))

    def report_end(self, number: int, end: LinkEnd) -> None:
        """Take note of how a rank ends; all ranks are killed because of it, and one of the first reports is shown."""
        if not self._ending:
            self._ends.setdefault(number, end)
            self._ended.set()
            if end.was_killed or len(self._ends) == len(self.ranks):
                self._found.set()

    async def _judge(self) -> None:
        """Wait for the first report, and a little for that of its cause, and kill all ranks."""
        await self._ended.wait()
        with anyio.move_on_after(self._grace_s):
            await self._found.wait()
        number = min(self._ends, key=lambda number: _suspicion(self._ends[number]))
        self._first_death = self._describe(number)
        self._died.set()
        self.kill()

    def _describe(self, number: int) -> str:
        """Return the end of a rank in words, after a rank that had fallen silent before, which is the cause."""
        end = self._ends[number]
        name = self.silences.name(number) if len(self.ranks) > 1 else ""
        if end.is_lost:
            return f"{name} {end.reason}"
        reason = f"{name and name + ': '}{end.reason}"
        silent = self.silences.describe(but=number)
        return f"{silent}; then {_in_one_line(reason)}" if silent else reason

    async def obituary(self) -> str:
        """Return the end, in words, of the rank that is the cause, and the end of its log."""
        with anyio.move_on_after(self._grace_s + RANK_KILL_S):
            await self._died.wait()
        return self._first_death or f"still running but its output is closed{await self.first.log_end()}"

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    async def end(self) -> None:
        """Dismiss rank 0, which ends the others, and return when all have ended, or after `QUIT_S`.

        After `QUIT_S` the others are dismissed too: it ends a rank that waits in a collective at once.
        """
        self._ending = True
        await self.first.dismiss()
        with anyio.move_on_after(QUIT_S):
            for rank in self.ranks:
                await rank.ended()
        for rank in self.others:
            await rank.dismiss()


async def worker_ended(log_path: Path) -> None:
    """Return when no process holds a log of this trainer: one whose driver was killed ends after the request in progress."""

    def wait() -> None:
        for path in [log_path, *log_path.parent.glob(f"{log_path.stem}-*{log_path.suffix}")]:
            with suppress(OSError), path.open("rb") as log:
                fcntl.flock(log, fcntl.LOCK_EX)

    await anyio.to_thread.run_sync(wait, abandon_on_cancel=True)


def rank_log(log_path: Path, rank: int) -> Path:
    """Return the log of one rank: `trainer.log` for rank 0, `trainer-1.log` for rank 1."""
    return log_path if rank == 0 else log_path.with_stem(f"{log_path.stem}-{rank}")


def _suspicion(end: LinkEnd) -> int:
    """Return a lower number for an end that is rather the cause of the others."""
    if end.was_killed:
        return 0
    return 2 if any(words in end.reason for words in _LOST_ANOTHER) else 1


def _in_one_line(reason: str) -> str:
    first, *_, last = lines if len(lines := reason.strip().splitlines()) > 1 else [reason, ""]
    return f"{first} {last}".rstrip()


async def _last_words(link: Link) -> str:
    try:
        _, reply = protocol.decode_reply(await link.receive())
    except InvariantError:
        reply = None
    return reply.message if isinstance(reply, protocol.Failed) else "it sent what is not a heartbeat"


def started_ranks(
    config: TrainerConfig, cluster: ClusterConfig, launcher: Launcher, log_path: Path
) -> AbstractAsyncContextManager[Sequence[Link]]:
    """Return the block in which the ranks of `trainer.parallel` run, and which yields their links, rank 0 first."""
    world = config.parallel.shape.world
    if cluster.launcher == "attach":
        return attached_links(cluster, world)
    environment = {"OMP_NUM_THREADS": str(config.threads), "TOKENIZERS_PARALLELISM": "false"}
    if cluster.launcher == "local":
        return _ranks_with_pipes(world, log_path, environment)
    return _launched_ranks(world, cluster, launcher, log_path, environment, device=config.device)


@asynccontextmanager
async def _ranks_with_pipes(world: int, log_path: Path, environment: Mapping[str, str]) -> AsyncGenerator[Sequence[Link]]:
    # Not in a temporary directory, which a killed driver would leave behind.
    store = log_path.with_suffix(".ranks").absolute()
    # The name of a machine often stands for its address in a network, and gloo would listen there.
    loopback = interface_of(LOOPBACK)
    environment = environment if loopback is None else {**environment, "GLOO_SOCKET_IFNAME": loopback}
    specs = [
        _rank_spec(rank, log_path, environment, RankPlace(rank=rank, world=world, store=str(store)).arguments())
        for rank in range(world)
    ]
    _remove_store(store)
    try:
        async with local_links(specs) as links:
            yield links
    finally:
        _remove_store(store)


@asynccontextmanager
async def _launched_ranks(
    world: int, cluster: ClusterConfig, launcher: Launcher, log_path: Path, environment: Mapping[str, str], *, device: str
) -> AsyncGenerator[Sequence[Link]]:
    """Yield ranks that each reserve a GPU, unless `device` is `cpu`, or `auto` and the launcher has none."""
    gpus = 0 if device == "cpu" or (device == "auto" and not await launcher.reserves_gpus()) else 1
    specs = [
        _rank_spec(rank, log_path, {**environment, "RANK": str(rank), "WORLD_SIZE": str(world)}, gpus=gpus)
        for rank in range(world)
    ]
    async with launched_links(launcher, cluster, specs, names="trainer ranks") as links:
        yield links


def _rank_spec(
    rank: int, log_path: Path, environment: Mapping[str, str], arguments: Sequence[str] = (), *, gpus: int = 0
) -> ProcessSpec:
    return ProcessSpec(
        name=f"trainer rank {rank}",
        role="trainer",
        command=(sys.executable, "-m", WORKER_MODULE, *arguments),
        environment=environment,
        log_path=rank_log(log_path, rank),
        gpus=gpus,
    )


def _remove_store(store: Path) -> None:
    with suppress(OSError):  # it is not there, or neither is its folder
        store.unlink()
