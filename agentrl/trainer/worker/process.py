"""A trainer process: `python -m agentrl.trainer.worker.process` answers requests on its standard streams.

Invariant: each request gets one reply, after heartbeats. Requests that need the weights are answered in order, and those
about weights that are held already (`SendingRequest`) meanwhile. An error of `agentrl.errors` is a reply and leaves the
worker usable; any other exception ends the process. The process ends when its standard input closes or its driver ends; a
trainer of one process finishes the request in progress.

Of several processes rank 0 speaks to the driver. It shares each request with the others, so that all of them answer it
together. The reply carries the error of any rank: none is left waiting for another that gave up.

A thread reads the requests. It ends this process when the driver goes, also inside a collective, and without a word to the
other ranks, whose links end too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, NoReturn, cast

import numpy as np

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import AgentRLError, ConfigError, InvariantError, LaunchError, TrainerDied, UpdatePending
from agentrl.processes.frames import ByteSource, FrameWriter, read_frames, read_in_thread, take_standard_streams
from agentrl.processes.machine import free_memory
from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.checkpoints.write import BackgroundWriter, CheckpointJob
from agentrl.trainer.config import TrainerConfig, snapshot_kind
from agentrl.trainer.parallel.ranks import together
from agentrl.trainer.worker import protocol
from agentrl.trainer.worker.place import RankPlace
from agentrl.weights.config import SyncConfig

if TYPE_CHECKING:
    import torch

    from agentrl.trainer.parallel.ranks import Ranks
    from agentrl.trainer.policy import PolicyTrainer
    from agentrl.trainer.worker.outgoing import OutgoingWeights

Ending = Literal["at once", "when idle", "when dismissed", "after the request"]
"""Meaning of the stream's end. `at once`: this process ends, always. `when idle`: between two requests it is the end of
input, and within one the death of the driver. `when dismissed`: the death of the driver, unless it dismissed this rank.
`after the request`: the end of input, and the request under way is finished."""


class NumberedCall(NamedTuple):
    """A request and its number."""

    number: int
    request: protocol.WorkerRequest


class Inbox:
    """The requests that have come; each `SendingRequest` is answered aside, also while this rank works on another one."""

    def __init__(self, source: ByteSource, *, ends: Ending) -> None:
        self._ends = ends
        self._calls: SimpleQueue[NumberedCall | BaseException | None] = SimpleQueue()
        self._aside: Callable[[NumberedCall], None] | None = None
        self._lock = threading.Lock()
        self._busy = self._broken = self._dismissed = False
        self._thread = read_in_thread(read_frames(source), self._take, self._end)

    def next(self) -> NumberedCall | None:
        """Wait for the next request; None: the driver has closed the stream, or dismissed this rank."""
        call = self._calls.get()
        if isinstance(call, BaseException):
            raise call
        return call

    def answer_aside(self, action: Callable[[NumberedCall], None]) -> None:
        """From now on, answer each `SendingRequest` by `action`, in a thread of its own."""
        self._aside = action

    @contextmanager
    def working(self) -> Generator[None]:
        with self._lock:
            self._busy = True
            self._end_with_driver()
        try:
            yield
        finally:
            with self._lock:
                self._busy = False

    def wait(self) -> None:
        self._thread.join()

    def _take(self, body: bytes) -> None:
        if not body:
            if self._ends == "at once":
                os._exit(0)
            self._dismissed = True
            self._calls.put(None)
            return
        call = NumberedCall(*protocol.decode_request(body))
        # A sending waits for servers; in the main thread it would hold up the training step that runs beside it.
        if self._aside is not None and isinstance(call.request, protocol.SendingRequest):
            threading.Thread(target=self._run_aside, args=(self._aside, call), name="agentrl sending", daemon=True).start()
        else:
            self._calls.put(call)

    def _end(self, problem: BaseException | None) -> None:
        if problem is not None:
            self._calls.put(problem)  # the thread that gets it can end the process
            return
        if self._dismissed:
            os._exit(0)
        with self._lock:
            self._broken = True
            self._end_with_driver()
        self._calls.put(None)

    def _end_with_driver(self) -> None:
        waits = self._ends == "after the request" or (self._ends == "when idle" and not self._busy)
        if self._broken and not waits:
            os._exit(1)

    def _run_aside(self, action: Callable[[NumberedCall], None], call: NumberedCall) -> None:
        try:
            action(call)
        except BaseException:  # noqa: BLE001 - as in the main thread, what is no error of agentrl ends the process
            traceback.print_exc()
            os._exit(1)


@dataclass(slots=True, kw_only=True)
class _Worker:
    trainer: PolicyTrainer
    outgoing: OutgoingWeights
    checkpoints: BackgroundWriter
    source: Path
    snapshot: Literal["auto", "host", "stream"]
    """`trainer.snapshot`; `auto` until the first version is held."""
    free_memory: Callable[[], int | None]
    """Returns the free bytes of this machine."""
    sends_adapter: bool = False
    """Whether servers get the adapter and not merged weights."""
    published_version: int | None = None
    """Version as which the present weights were held; None when they were not."""

    @property
    def ranks(self) -> Ranks:
        return self.trainer.model.ranks

    def ready(self) -> protocol.Ready:
        model = self.trainer.model
        count = sum(parameter.numel() for parameter in model.parameters.values())
        return protocol.Ready(device=str(model.device), num_parameters=count, vocab_size=model.vocab_size)

    def share(self, request: protocol.WorkerRequest) -> protocol.WorkerReply:
        """Answer on rank 0, after the other ranks have the request too; only rank 0 knows whether weights are being sent."""
        changes = isinstance(request, protocol.TrainStep | protocol.Restore | protocol.HoldWeights)
        # Checked before the other ranks hear of the request: afterwards they would run it, and wait for rank 0.
        if changes and self.outgoing.must_not_change:
            raise InvariantError(f"{type(request).__name__} while weights are being sent; finish the sending first")
        self.ranks.share(protocol.encode(request))
        return together(self.ranks, partial(self.answer, request))

    def answer(self, request: protocol.WorkerRequest) -> protocol.WorkerReply:
        match request:
            case protocol.TrainStep():
                self._forget_published()
                return protocol.pack_report(self.trainer.step(protocol.unpack_batch(request)))
            case protocol.HoldWeights():
                return self._hold(request)
            case protocol.Logprobs():
                sequences, temperatures = protocol.unpack_sequences(request)
                values = self.trainer.numbers(request.of, sequences, temperatures)
                return protocol.LogprobsReply(protocol.pack_float32(np.concatenate([np.empty(0, np.float32), *values])))
            case protocol.Save():
                return self._save(request)
            case protocol.FinishSave():
                done = self.checkpoints.finish(wait=request.wait)
                return protocol.Saved(None, 0.0) if done is None else protocol.Saved(done.directory, done.seconds)
            case protocol.Restore():
                return self._restore(request)
            case protocol.Setup():
                raise InvariantError("the trainer worker was set up twice")
            case _:
                return self.outgoing.answer(request)

    def _forget_published(self) -> None:
        self.published_version = None
        self.outgoing.forget_changed()

    def _hold(self, request: protocol.HoldWeights) -> protocol.WeightsHeld:
        if request.again and request.version != self.published_version:
            raise UpdatePending(
                f"the trainer's weights are past version {request.version}; the server gets weights with the next update"
            )
        import torch

        from agentrl.trainer.worker.outgoing import HeldWeights

        # Before the next copy is made, so that there are two only while the former is being sent.
        self.outgoing.forget(request.dtype)
        if self.sends_adapter:
            return self._hold_adapter(request)
        model, dtype = self.trainer.model, None if request.dtype is None else getattr(torch, request.dtype)
        num_bytes, free = model.num_bytes(dtype), None
        if self.snapshot == "auto":
            free = self.free_memory()
            self.snapshot = snapshot_kind(self.snapshot, num_bytes, free)
        copied = self.snapshot == "host"
        stays = copied or model.leaves_as_copies
        tensors = model.weights(dtype, copied=copied, in_file=not copied)
        if self.ranks.rank == 0:
            self.outgoing.hold(HeldWeights(version=request.version, dtype=request.dtype, tensors=tensors, snapshot=stays))
        self.trainer.published(request.version)
        self.published_version = request.version
        return protocol.WeightsHeld(snapshot=stays, in_file=stays and not copied, num_bytes=num_bytes, free_bytes=free)

    def _hold_adapter(self, request: protocol.HoldWeights) -> protocol.WeightsHeld:
        from agentrl.trainer.worker.outgoing import HeldWeights

        model, adapter = self.trainer.model, self.trainer.model.adapter
        if adapter is None:
            raise InvariantError("sync.adapter: adapter needs trainer.lora; the run file was checked for it")
        documents, tensors = adapter.documents(model.base), adapter.copies(self.ranks)
        if self.ranks.rank == 0:
            held = HeldWeights(version=request.version, dtype=None, tensors=tensors, snapshot=True, documents=documents)
            self.outgoing.hold(held)
        self.trainer.published(request.version)
        self.published_version = request.version
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return protocol.WeightsHeld(snapshot=True, num_bytes=num_bytes, free_bytes=None)

    def _save(self, request: protocol.Save) -> protocol.SaveBegun:
        # One at a time: each holds a copy of the weights and the optimizer until it is written.
        self.checkpoints.finish(wait=True)
        job = CheckpointJob(
            directory=Path(request.directory),
            parts=self.trainer.stage(),
            state=self.trainer.state,
            note=request.note,
            source=self.source,
        )
        self.checkpoints.start(job)
        return protocol.SaveBegun()

    def _restore(self, request: protocol.Restore) -> protocol.Restored:
        rank, world = self.ranks.rank, self.ranks.world
        # Each rank checks other files; all must agree before the first weight changes.
        checkpoint = together(self.ranks, partial(read_checkpoint, Path(request.directory), rank=rank, world=world))
        self._forget_published()
        self.trainer.restore(checkpoint)
        return protocol.Restored(checkpoint.state.policy_version, checkpoint.state.steps, checkpoint.note)


LAST_WORDS = 16_000
"""Characters of a traceback that go to the driver; the end of it."""


def answer_requests(
    inbox: Inbox,
    writer: FrameWriter,
    *,
    place: RankPlace | None = None,
    free: Callable[[], int | None] = free_memory,
) -> None:
    """Answer the requests of the driver until they end, each by one reply that heartbeats precede; the first is `Setup`.

    Without `place` the process is alone. `free` returns the bytes that this machine can still give; None: not known.
    """
    with ExitStack() as stack:
        set_up = partial(_set_up, place=place or RankPlace(), stack=stack, free=free)
        worker = _set_up_first(inbox, writer, set_up)
        if worker is None:
            return
        stack.callback(worker.outgoing.close)
        stack.push(partial(_close_writer, worker.checkpoints))
        while (call := inbox.next()) is not None:
            with inbox.working():
                _answer_call(writer, worker.share, call)
        worker.ranks.share(b"")  # the other ranks end too


def _set_up_first(inbox: Inbox, writer: FrameWriter, set_up: Callable[[protocol.WorkerRequest], _Worker]) -> _Worker | None:
    """Answer requests until one has set the worker up; None: the driver left before."""
    made: list[_Worker] = []

    def answer(request: protocol.WorkerRequest) -> protocol.WorkerReply:
        made.append(set_up(request))
        inbox.answer_aside(partial(_answer_call, writer, made[0].answer))  # before the driver knows that it may send such
        return made[0].ready()

    while not made and (call := inbox.next()) is not None:
        with inbox.working():
            _answer_call(writer, answer, call)
    return made[0] if made else None


def _answer_call(
    writer: FrameWriter, action: Callable[[protocol.WorkerRequest], protocol.WorkerReply], call: NumberedCall
) -> None:
    """Send what `action` returns for the request, or its error of `agentrl.errors`; heartbeats precede it."""
    try:
        with writer.beating():
            reply = action(call.request)
    except AgentRLError as error:
        reply = protocol.Failed(type(error).__name__, str(error))
    writer.send(protocol.encode(reply, call.number))


def follow_rank_0(inbox: Inbox, writer: FrameWriter, place: RankPlace) -> None:
    """Set up from the first request, then answer what rank 0 shares, until it ends; heartbeats go to the driver."""
    import torch.distributed as dist

    call = inbox.next()
    if call is None:
        return
    with writer.beating(), ExitStack() as stack:
        try:
            worker = _set_up(call.request, place=place, stack=stack, free=free_memory)
        except AgentRLError as error:
            if place.seat is not None and not dist.is_initialized():  # else rank 0 has it too, and replies with it
                _send_last_words(writer, str(error))
            inbox.wait()
            return
        stack.push(partial(_close_writer, worker.checkpoints))
        while body := worker.ranks.share(None):
            with suppress(AgentRLError):  # as above
                _, request = protocol.decode_request(body)
                together(worker.ranks, partial(worker.answer, request))


def _close_writer(writer: BackgroundWriter, kind: type[BaseException] | None, *_: object) -> None:
    """Wait for the checkpoint that is being written; after an error the threads of other ranks may never answer."""
    if kind is None:
        writer.close()


def main() -> None:
    """Run the worker: on the standard streams, or with `--attach HOST:PORT` on a connection to the driver."""
    match sys.argv[1:]:
        case ["--attach", address]:
            try:
                place = RankPlace.joined(address, os.environ)
            except (ConfigError, LaunchError) as error:
                sys.exit(f"agentrl: {error}")
            _ignore_signals()
            assert place.seat is not None
            requests: ByteSource = place.seat.connection.makefile("rb")
            replies: BinaryIO = place.seat.connection.makefile("wb")
            ends = "when dismissed"
        case arguments:
            _ignore_signals()
            place = RankPlace.parse(arguments)
            requests, replies = take_standard_streams()
            ends = "when idle" if place.world > 1 else "after the request"
    inbox, writer = Inbox(requests, ends="at once" if place.rank else ends), FrameWriter(replies)
    try:
        if place.rank:
            follow_rank_0(inbox, writer, place)
        else:
            answer_requests(inbox, writer, place=place)
        writer.close()
    except BaseException as error:  # noqa: BLE001 - this process ends with it
        _fail(error, writer if place.seat else None)


def _ignore_signals() -> None:
    """Ignore what reaches every process of a terminal or a service: the driver ends its ranks after the last checkpoint."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _fail(error: BaseException, writer: FrameWriter | None) -> NoReturn:
    """Print the traceback, send it to a driver that cannot read this log, and end at once.

    Nothing is torn down: a process group would wait for ranks that wait for this one.
    """
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    sys.stderr.flush()
    if writer is not None:
        _send_last_words(writer, text[-LAST_WORDS:])
    os._exit(1)


def _send_last_words(writer: FrameWriter, text: str) -> None:
    writer.send(protocol.encode(protocol.Failed(TrainerDied.__name__, text)))
    writer.close()


def _set_up(
    request: protocol.WorkerRequest, *, place: RankPlace, stack: ExitStack, free: Callable[[], int | None]
) -> _Worker:
    """Join the other ranks, and then load the model on all of them or on none; `stack` leaves them."""
    if not isinstance(request, protocol.Setup):
        raise InvariantError(f"the first request to a trainer worker must be Setup, not {type(request).__name__}")
    import torch

    from agentrl.trainer.model import resolve_device

    config = TrainerConfig.model_validate_json(request.trainer)
    torch.set_num_threads(config.threads)
    torch.manual_seed(request.seed)
    device = place.device_of(resolve_device(config.device))
    if device.type == "cuda" and cast("int | None", device.index) is not None:
        torch.cuda.set_device(device)  # FSDP splits weights on the current device
    ranks = _join(place, config, device, stack)
    return together(ranks, partial(_load_worker, request, config, device, ranks, free))


def _load_worker(
    request: protocol.Setup, config: TrainerConfig, device: torch.device, ranks: Ranks, free: Callable[[], int | None]
) -> _Worker:
    from agentrl.trainer.model import PolicyModel
    from agentrl.trainer.policy import PolicyTrainer
    from agentrl.trainer.worker.outgoing import OutgoingWeights
    from agentrl.weights.sender import WeightSender

    algorithm = AlgorithmConfig.model_validate_json(request.algorithm)
    model = PolicyModel(
        request.model_path,
        device=device,
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        ranks=ranks,
        share=config.shared_prefixes == "auto",
        lora=config.lora,
        trainable=config.trainable,
        seed=request.seed,
    )
    trainer = PolicyTrainer(model, config, algorithm, total_steps=request.total_steps, seed=request.seed)
    sync, source = SyncConfig.model_validate_json(request.sync), Path(request.model_path)
    outgoing = OutgoingWeights(WeightSender(sync, model.device), sync, source)
    return _Worker(
        trainer=trainer,
        outgoing=outgoing,
        checkpoints=BackgroundWriter(ranks),
        source=source,
        snapshot=config.snapshot,
        free_memory=free,
        sends_adapter=sync.adapter == "adapter",
    )


def _join(place: RankPlace, config: TrainerConfig, device: torch.device, stack: ExitStack) -> Ranks:
    """Return this process among the ranks; one of float32 stays alone, for whole weights train faster than split ones."""
    from agentrl.trainer.parallel.ranks import Ranks, joined

    shape = config.parallel.shape
    if place.world != shape.world:
        raise InvariantError(f"trainer.parallel: {shape} needs {shape.world} processes, and {place.world} were started")
    if shape.world == 1 and config.dtype == "float32":
        return Ranks()
    ranks = joined(place.open_store(), place.rank, shape, device=device, timeout_s=config.collective_timeout_s)
    return stack.enter_context(ranks)


if __name__ == "__main__":
    main()
