"""The driver's side of a trainer worker: a `Trainer` and its `WeightChannel` whose calls go to a subprocess. No torch here.

Invariant: the process lives exactly as long as the `launch_trainer` block. Each call ends in its reply, in the worker's own
error, or in a `TrainError` that names how the worker died or how long the driver waited; a worker that is not done by then
is killed. A `SendingRequest` runs while others do; all other requests follow one another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import anyio

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import ConfigError, InvariantError, TrainerDied, TrainError, error_named
from agentrl.processes.base import Launcher, LocalLauncher
from agentrl.processes.config import ClusterConfig
from agentrl.processes.link import STREAM_ENDS, Link, LinkEnd
from agentrl.processes.machine import is_loopback
from agentrl.support.concurrency import task_group
from agentrl.trainer.base import SaveReport, StepReport, TrainBatch
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker import protocol
from agentrl.trainer.worker.channel import AnyReply, TrainerChannel
from agentrl.trainer.worker.protocol import SendingRequest, pack_batch, pack_sequences, split_logprobs, unpack_report
from agentrl.trainer.worker.ranks import TrainerRanks, started_ranks
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.config import SyncConfig
from agentrl.weights.types import Publication


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The point from which a restored trainer continues."""

    policy_version: int
    steps: int
    """Batches consumed before the checkpoint."""
    note: str
    """The note that was passed to `save`."""


@dataclass(slots=True, kw_only=True, eq=False)
class _PendingRequest:
    number: int
    body: bytes
    ended: anyio.Event = field(default_factory=anyio.Event)
    reply: protocol.WorkerReply | None = None


class _Exchanges:
    """The requests under way on the link of rank 0; `read` must run for as long as they are made.

    A reply goes to the request whose number it carries; the last words of a worker, and the error that ends the link, go to
    all of them, and to every later one.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[int, _PendingRequest] = {}
        self._made = 0
        self._failure: Exception | None = None
        # Concurrent requests must not mix their frames.
        self._sending = anyio.Lock()

    def numbered(self, request: protocol.WorkerRequest) -> _PendingRequest:
        self._made += 1
        return _PendingRequest(number=self._made, body=protocol.encode(request, self._made))

    async def exchange(self, request: _PendingRequest) -> protocol.WorkerReply:
        """Send `request` and return its reply, or raise what ended the link.

        Cancellation: a request that was sent in part breaks the link; otherwise its reply is dropped.
        """
        self._waiting[request.number] = request
        try:
            # Registered before it is sent: the reply may come before this task runs again.
            await self._send(request.body)
            await request.ended.wait()
        finally:
            del self._waiting[request.number]
        if request.reply is None:
            assert self._failure is not None
            raise self._failure
        return request.reply

    async def read(self) -> None:
        try:
            while True:
                number, reply = protocol.decode_reply(await self._link.receive())
                waiting = self._waiting.get(number)
                # A worker that dies answers every request with them, since it answers none of them any more.
                last_words = isinstance(reply, protocol.Failed) and reply.kind == TrainerDied.__name__
                for request in self._waiting.values() if last_words else [waiting] if waiting is not None else []:
                    request.reply = reply
                    request.ended.set()
        # The reader ends without an error of its own: the call that waits for a reply raises it, with its name.
        except (*STREAM_ENDS, InvariantError) as error:
            self._fail(error)

    async def _send(self, body: bytes) -> None:
        async with self._sending:
            if self._failure is not None:
                raise self._failure
            sent = False
            try:
                await self._link.send(body)
                sent = True
            finally:
                # A frame that was cut short makes all later bytes of the link unreadable.
                if not sent:
                    self._fail(anyio.BrokenResourceError())

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        for waiting in self._waiting.values():
            waiting.ended.set()


class RemoteTrainer:
    """A `Trainer` in a process of its own; `launch_trainer` makes one. The worker answers one call at a time, in order.

    After a call was cancelled or got no reply, the state of the worker is unknown and every later call raises `TrainError`.
    """

    @classmethod
    @asynccontextmanager
    async def connected(cls, ranks: TrainerRanks, timeout_s: float) -> AsyncGenerator[Self]:
        """Yield a trainer that speaks to `ranks`, whose model is not loaded yet; a call may take `timeout_s` seconds."""
        async with task_group() as tasks:
            trainer = cls(ranks, timeout_s)
            tasks.start_soon(trainer._exchanges.read)
            yield trainer
            tasks.cancel_scope.cancel()

    def __init__(self, ranks: TrainerRanks, timeout_s: float) -> None:
        self.pid: int = ranks.first.pid
        self.pids: tuple[int, ...] = tuple(rank.pid for rank in ranks.ranks)
        """Ids of all worker processes, by rank, each on its machine."""
        self.device = ""
        """Device the model is on, such as `cpu` or `cuda`."""
        self.num_parameters = 0
        self.channel = TrainerChannel(self._call)
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._name = ranks.silences.name(0)
        self._exchanges = _Exchanges(ranks.first)
        self._broken: str | None = None
        self._died = False
        # Held by the call that needs the weights: the worker answers such calls one after the other.
        self._turn = anyio.Lock()

    @property
    def idle(self) -> bool:
        """Whether the worker waits for a request, so that it ends by itself when its input closes."""
        return self._broken is None

    @property
    def steps_while_sending(self) -> bool:
        return self.channel.steps_while_sending

    async def hold(self, version: int, *, dtype: str | None) -> None:
        await self.channel.hold(version, dtype=dtype)

    async def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch`; runs while a snapshot is sent or written, and waits until other weights are.

        Raises:
            TrainError: the worker dies, misses its deadline, or stops after too many non-finite steps in a row.

        Cancellation: the worker finishes the step; this trainer cannot be used again.
        """
        async with self.channel.stepping():
            reply = await self._call(pack_batch(batch), protocol.Stepped, _training_on(len(batch.samples)))
        return unpack_report(reply)

    async def publish(self, version: int, directory: str) -> Publication:
        """Write weights to `directory/v<version>`, atomically, and return their path and digests.

        They are those that `hold` took as `version` to be written, or else the present ones. Earlier versions stay.

        Cancellation: the directory is complete or absent; this trainer cannot be used again.
        """
        what = f"publishing version {version}"
        async with self.channel.holding(version, dtype=None, what=what):
            reply = await self._call(protocol.Publish(version, _whole_path(directory)), protocol.Published, what)
        return Publication(
            version=reply.version,
            path=reply.path,
            checksum=reply.checksum,
            tensor_checksums=reply.tensor_checksums,
            adapter=reply.adapter,
        )

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        """Return, for each [L] int32 sequence, [L-1] float32 log-probs of tokens 1.. under the current weights."""
        what = f"computing the log-probs of {len(sequences)} sequences"
        reply = await self._call(pack_sequences(sequences, temperatures), protocol.LogprobsReply, what)
        return split_logprobs(reply, sequences)

    async def values(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Return, for each [L] int32 sequence, [L-1] float32 values of the critic; raises as `Trainer.values`."""
        what = f"computing the values of {len(sequences)} sequences"
        reply = await self._call(pack_sequences(sequences, of="critic"), protocol.LogprobsReply, what)
        return split_logprobs(reply, sequences)

    async def reference_logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[Float32Array]
    ) -> list[Float32Array]:
        """Return, for each [L] int32 sequence, [L-1] float32 log-probs of the reference, as `Trainer.reference_logprobs`."""
        what = f"computing the reference log-probs of {len(sequences)} sequences"
        reply = await self._call(pack_sequences(sequences, temperatures, "reference"), protocol.LogprobsReply, what)
        return split_logprobs(reply, sequences)

    async def save(self, directory: str, note: str = "") -> None:
        """Begin to write a checkpoint as `Trainer.save`; `restore` returns `note`.

        Cancellation: the directory is complete or absent; this trainer cannot be used again.
        """
        await self._call(protocol.Save(_whole_path(directory), note), protocol.SaveBegun, f"saving {directory}")

    async def finish_save(self, *, wait: bool) -> SaveReport | None:
        """Return the checkpoint that `save` began, as `Trainer.finish_save`.

        Cancellation: the directory is complete or absent; this trainer cannot be used again.
        """
        reply = await self._call(protocol.FinishSave(wait), protocol.Saved, "writing the checkpoint")
        return None if reply.directory is None else SaveReport(directory=reply.directory, seconds=reply.seconds)

    async def restore(self, directory: str) -> RestoreReport:
        """Load the checkpoint at `directory` and continue exactly where it was written."""
        async with self.channel.stepping():
            reply = await self._call(protocol.Restore(_whole_path(directory)), protocol.Restored, f"restoring {directory}")
        return RestoreReport(policy_version=reply.policy_version, steps=reply.steps, note=reply.note)

    async def set_up(self, setup: protocol.Setup) -> None:
        """Load the model; `launch_trainer` calls this once."""
        body = protocol.encode(setup)
        for rank in self._ranks.others:
            with suppress(*STREAM_ENDS):  # it has died, and its death is reported with the reply's absence
                await rank.send(body)
        reply = await self._call(setup, protocol.Ready, f"loading {setup.model_path}")
        self.device = reply.device
        self.num_parameters = reply.num_parameters

    async def _call(self, request: protocol.WorkerRequest, expected: type[AnyReply], what: str) -> AnyReply:
        numbered = self._exchanges.numbered(request)
        # The worker sends weights while it trains, so this call does not wait for those that use the model.
        turn: AbstractAsyncContextManager[object] = nullcontext() if isinstance(request, SendingRequest) else self._turn
        async with turn:
            if self._broken is not None:
                kind = TrainerDied if self._died else TrainError
                raise kind(f"{what}: the trainer worker cannot be used again: {self._broken}; start a new one")
            try:
                with anyio.fail_after(self._timeout_s), self._ranks.silences.working(what, self._timeout_s):
                    reply = await self._exchanges.exchange(numbered)
            except TimeoutError:
                # It may be stopped. If it continued later, it would write to files that another process has taken over.
                self._ranks.kill()
                late = f"{what} took more than {self._timeout_s:g} s (trainer.call_timeout_s), so it was killed"
                self._died, self._broken = True, f"{late}; {await self._ranks.obituary()}"
                raise TrainerDied(f"the driver waited for the trainer {self._name}: {self._broken}") from None
            except STREAM_ENDS:
                self._died, self._broken = True, f"it died while {what}; {await self._ranks.obituary()}"
                raise TrainerDied(f"trainer worker: {self._broken}") from None
            except BaseException:  # cancelled, or the reply was none
                self._broken = f"{what} got no reply"
                raise
            if isinstance(reply, protocol.Failed) and reply.kind == TrainerDied.__name__:
                self._ranks.report_end(0, LinkEnd(reason=reply.message, was_killed=False))
                self._died, self._broken = True, f"it died while {what}; {await self._ranks.obituary()}"
                raise TrainerDied(f"trainer worker: {self._broken}")
        if isinstance(reply, protocol.Failed):
            raise error_named(reply.kind, reply.message) or TrainError(f"{reply.kind}: {reply.message}")
        if not isinstance(reply, expected):
            raise InvariantError(f"{what}: expected {expected.__name__}, the trainer worker answered {type(reply).__name__}")
        return reply


@asynccontextmanager
async def launch_trainer(
    config: TrainerConfig,
    algorithm: AlgorithmConfig,
    *,
    model_path: str | Path,
    total_steps: int,
    seed: int,
    log_path: str | Path,
    sync: SyncConfig | None = None,
    cluster: ClusterConfig | None = None,
    launcher: Launcher | None = None,
) -> AsyncGenerator[RemoteTrainer]:
    """Yield a trainer in the processes of `trainer.parallel` with the model loaded; they end with the block.

    Args:
        config: optimizer, device and limits.
        algorithm: the loss and the staleness bound.
        model_path: local HF checkpoint; each publication and checkpoint gets a copy of its config and tokenizer files.
        total_steps: batches of the run; the learning-rate schedule ends there.
        seed: of the worker's random generators, and of the shuffle into minibatches.
        log_path: the worker appends its output to this file.
        sync: how the worker sends weights from memory to servers; None means the defaults.
        cluster: where the processes start; None: on this machine.
        launcher: starts them under `cluster.launcher: ray`.

    Raises:
        ConfigError: the model cannot be loaded or the device does not exist.
        LaunchError: a process does not start, or does not join in time.

    Cancellation: the worker is ended, or killed if it is busy, within 5 seconds.
    """
    _check_model(Path(model_path))
    starting = started_ranks(config, cluster or ClusterConfig(), launcher or LocalLauncher(), Path(log_path))
    async with (
        starting as links,
        TrainerRanks.watching(links, lost_s=config.collective_timeout_s if len(links) > 1 else None) as ranks,
        RemoteTrainer.connected(ranks, config.call_timeout_s) as trainer,
    ):
        setup = protocol.Setup(
            model_path=_whole_path(str(model_path)),
            trainer=config.model_dump_json(),
            algorithm=algorithm.model_dump_json(),
            sync=_sync_from(links[0], sync or SyncConfig()).model_dump_json(),
            total_steps=total_steps,
            seed=seed,
        )
        try:
            await trainer.set_up(setup)
            yield trainer
        finally:
            # A worker that is busy would not read its dismissal; it is killed as the block ends.
            if trainer.idle:
                with anyio.CancelScope(shield=True):
                    await ranks.end()


def _sync_from(first: Link, sync: SyncConfig) -> SyncConfig:
    """Return `sync` with an address of rank 0's machine, where a launcher placed it on another than the driver's."""
    if first.host is None or is_loopback(first.host) or not is_loopback(sync.address):
        return sync
    return sync.model_copy(update={"address": first.host})


def _training_on(samples: int) -> str:
    return f"training on {samples} samples" if samples else "counting a step whose batch has no gradient"


def _check_model(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: expected a local Hugging Face model directory with a config.json (model.path)")


def _whole_path(directory: str) -> str:
    """Return the path from the root: servers and ranks may run in other working directories."""
    return str(Path(directory).absolute())
