"""A trainer process: `python -m agentrl.trainer.worker.process` answers requests on its standard streams, one at a time.

Invariant: each request gets one reply, in order; heartbeats precede it while the worker runs. An error of `agentrl.errors`
is a reply and leaves the worker usable; any other exception ends the process with a traceback on its standard error. The
process ends when its standard input closes or its driver ends. A trainer of one process finishes the request in progress.

A trainer of several processes has one that speaks to the driver, rank 0. It shares each request with the others, so that all
of them answer it together. The reply carries the error of any rank: none is left waiting for another that gave up.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn, TypeVar, cast

import numpy as np

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import AgentRLError, ConfigError, InvariantError, LaunchError, TrainerDied, TrainError, UpdatePending
from agentrl.trainer.checkpoints.background import BackgroundWriter
from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.checkpoints.write import CheckpointJob
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker import protocol
from agentrl.trainer.worker.lifeline import Lifeline
from agentrl.trainer.worker.place import RankPlace
from agentrl.watchdog.parent import ParentPipe
from agentrl.weights.config import SyncConfig
from agentrl.weights.disk import publish

if TYPE_CHECKING:
    import torch

    from agentrl.trainer.parallel.ranks import Ranks
    from agentrl.trainer.policy import PolicyTrainer
    from agentrl.weights.sender import WeightSender

Result = TypeVar("Result")


@dataclass(slots=True, kw_only=True)
class _Worker:
    trainer: PolicyTrainer
    sender: WeightSender
    """Its groups with servers; only rank 0 has any."""
    checkpoints: BackgroundWriter
    source: Path
    published_version: int | None = None
    """Version under which servers got the present weights; None when they have not got them."""

    @property
    def ranks(self) -> Ranks:
        return self.trainer.model.ranks

    def ready(self) -> protocol.Ready:
        """Return the reply to `Setup`."""
        model = self.trainer.model
        count = sum(parameter.numel() for parameter in model.parameters.values())
        return protocol.Ready(device=str(model.device), num_parameters=count, vocab_size=model.vocab_size)

    def refuse_while_sending(self, request: protocol.WorkerRequest) -> None:
        """Raise for a request that would change weights which are being sent. Only rank 0 knows whether they are."""
        if isinstance(request, protocol.TrainStep | protocol.Restore) and self.sender.sending:
            raise InvariantError(f"{type(request).__name__} while weights are being sent; finish the sending first")

    def answer(self, request: protocol.WorkerRequest) -> protocol.WorkerReply:
        """Answer on this rank, together with the others where the request needs the weights."""
        match request:
            case protocol.OpenGroups():
                requests = request.requests if self.ranks.rank == 0 else ()
                return protocol.GroupsOpened(tuple(self.sender.open(requests, request.keep)))
            case protocol.BeginSending():
                return self._begin_sending(request)
            case protocol.StartSending():
                self.sender.start(request.groups if self.ranks.rank == 0 else ())
                return protocol.SendingStarted()
            case protocol.FinishSending():
                return protocol.SendingFinished(self.sender.finish(request.abandoned))
            case protocol.TrainStep():
                self.published_version = None
                return protocol.pack_report(self.trainer.step(protocol.unpack_batch(request)))
            case protocol.Publish():
                return self._publish(request)
            case protocol.Logprobs():
                values = self.trainer.logprobs(*protocol.unpack_sequences(request))
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

    def _publish(self, request: protocol.Publish) -> protocol.Published:
        # Absolute, because a server may run in another working directory.
        directory = Path(request.directory).absolute()
        weights = self.trainer.model.export()
        self._set_published(request.version)
        if self.ranks.rank:
            return protocol.Published(request.version, str(directory), "", {})
        done = publish(weights, version=request.version, directory=directory, source=self.source)
        return protocol.Published(done.version, done.path, done.checksum, dict(done.tensor_checksums))

    def _begin_sending(self, request: protocol.BeginSending) -> protocol.SendingBegun:
        if request.again and request.version != self.published_version:
            raise UpdatePending(
                f"the trainer's weights are past version {request.version}; the server gets weights with the next update"
            )
        groups = request.groups if self.ranks.rank == 0 else ()
        manifest = self.sender.begin(request.version, self.trainer.model.weights(), groups, dtype=request.dtype)
        self._set_published(request.version)
        return protocol.SendingBegun(manifest)

    def _set_published(self, version: int) -> None:
        self.trainer.published(version)
        self.published_version = version

    def _save(self, request: protocol.Save) -> protocol.SaveBegun:
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
        checkpoint = _together(self.ranks, partial(read_checkpoint, Path(request.directory), rank=rank, world=world))
        self.published_version = None
        self.trainer.restore(checkpoint)
        return protocol.Restored(checkpoint.state.policy_version, checkpoint.state.steps, checkpoint.note)


LAST_WORDS = 16_000
"""Characters of a traceback that go to the driver; the end of it."""
BEAT_S = 2.0
"""Seconds between two heartbeats of a worker that works on a request."""


@contextmanager
def heartbeats(replies: BinaryIO, seconds: float) -> Generator[None]:
    """Write a heartbeat to `replies` every `seconds` while the block runs, from a thread."""
    done = threading.Event()

    def beat() -> None:
        with suppress(OSError):  # the driver has ended; the reply meets the same error
            while not done.wait(seconds):
                replies.write(protocol.HEARTBEAT)
                replies.flush()

    thread = threading.Thread(target=beat, name="agentrl heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def answer_requests(
    requests: BinaryIO,
    replies: BinaryIO,
    *,
    beat_s: float = BEAT_S,
    place: RankPlace | None = None,
    lifeline: Lifeline | None = None,
) -> None:
    """Read `requests` to its end and write one reply for each request to `replies`; the first request must be `Setup`.

    A heartbeat is written every `beat_s` seconds until the reply.

    Args:
        requests: frames of the driver.
        replies: frames to the driver.
        beat_s: seconds between two heartbeats.
        place: which of several processes this is; None: the only one.
        lifeline: what `requests` reads from; None: the end of the driver does not interrupt a request.

    Raises:
        InvariantError: when the stream is not a sequence of frames.
    """
    with ExitStack() as stack:
        worker: _Worker | None = None
        while (request := _read_request(requests)) is not None:
            try:
                with heartbeats(replies, beat_s), lifeline.working() if lifeline else nullcontext():
                    if worker is None:
                        worker = _set_up(request, place or RankPlace(), stack)
                        stack.callback(worker.sender.close)
                        stack.callback(worker.checkpoints.close)
                        reply = worker.ready()
                    else:
                        worker.refuse_while_sending(request)
                        worker.ranks.share(protocol.encode_body(request))
                        reply = _together(worker.ranks, partial(worker.answer, request))
            except AgentRLError as error:
                reply = protocol.Failed(type(error).__name__, str(error))
            replies.write(protocol.encode_frame(reply))
            replies.flush()
        if worker is not None:
            worker.ranks.share(b"")  # the other ranks end too


def follow_rank_0(setup: BinaryIO, replies: BinaryIO, place: RankPlace, lifeline: Lifeline) -> None:
    """Set up from the first frame of `setup`, then answer what rank 0 shares, until it ends; heartbeats go to `replies`."""
    import torch.distributed as dist

    request = _read_request(setup)
    if request is None:
        return
    with heartbeats(replies, BEAT_S), ExitStack() as stack:
        try:
            worker = _set_up(request, place, stack)
        except AgentRLError as error:
            if place.seat is not None and not dist.is_initialized():  # else rank 0 has it too, and replies with it
                _send_last_words(replies, str(error))
            lifeline.wait()
            return
        stack.callback(worker.checkpoints.close)
        while body := worker.ranks.share(None):
            with suppress(AgentRLError):  # as above
                _together(worker.ranks, partial(worker.answer, protocol.decode_request(body)))


def _together(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Return the result of `action`, which every rank runs; raise the error of the lowest rank that has one."""
    result, error = None, None
    try:
        result = action()
    except AgentRLError as raised:
        error = protocol.Failed(type(raised).__name__, str(raised))
    first = ranks.first_error(error and protocol.encode_failure(error))
    if first is not None:
        protocol.raise_failure(protocol.decode_failure(first))
    assert result is not None
    return result


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
            requests: BinaryIO = place.seat.connection.makefile("rb")
            replies: BinaryIO = place.seat.connection.makefile("wb")
            lifeline = Lifeline(requests, ends="at once" if place.rank else "when dismissed")
        case arguments:
            _ignore_signals()
            place = RankPlace.parse(arguments)
            requests, replies = _standard_streams()
            lifeline = Lifeline(requests, ends="at once" if place.rank else "when idle") if place.world > 1 else None
    frames = requests if lifeline is None else io.BufferedReader(lifeline)
    try:
        if place.rank:
            assert lifeline is not None
            follow_rank_0(frames, replies, place, lifeline)
        else:
            answer_requests(frames, replies, place=place, lifeline=lifeline)
    except ConnectionError:
        sys.exit("the driver has ended")
    except BaseException as error:  # noqa: BLE001 - this process ends with it
        _fail(error, replies if place.seat else None)


def _ignore_signals() -> None:
    """Ignore what reaches every process of a terminal or a service: the driver ends its ranks after the last checkpoint."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return standard input and output; nothing else in this process can touch the two any more."""
    requests = io.BufferedReader(ParentPipe(os.dup(0)))
    replies = os.fdopen(os.dup(1), "wb")
    # Other code that reads or prints in this process, native libraries included, must not touch the two streams.
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _fail(error: BaseException, replies: BinaryIO | None) -> NoReturn:
    """Print the traceback, send it to a driver that cannot read this log, and end at once.

    Nothing is torn down: a process group would wait for ranks that wait for this one.
    """
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    sys.stderr.flush()
    if replies is not None:
        _send_last_words(replies, text[-LAST_WORDS:])
    os._exit(1)


def _send_last_words(replies: BinaryIO, text: str) -> None:
    with suppress(OSError):
        replies.write(protocol.encode_frame(protocol.Failed(TrainerDied.__name__, text)))
        replies.flush()


def _set_up(request: protocol.WorkerRequest, place: RankPlace, stack: ExitStack) -> _Worker:
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
    return _together(ranks, partial(_load_worker, request, config, device, ranks))


def _load_worker(request: protocol.Setup, config: TrainerConfig, device: torch.device, ranks: Ranks) -> _Worker:
    from agentrl.trainer.model import PolicyModel
    from agentrl.trainer.policy import PolicyTrainer
    from agentrl.weights.sender import WeightSender

    algorithm = AlgorithmConfig.model_validate_json(request.algorithm)
    model = PolicyModel(
        request.model_path,
        device=device,
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        ranks=ranks,
    )
    trainer = PolicyTrainer(model, config, algorithm, total_steps=request.total_steps, seed=request.seed)
    sender = WeightSender(SyncConfig.model_validate_json(request.sync), model.device)
    return _Worker(trainer=trainer, sender=sender, checkpoints=BackgroundWriter(ranks), source=Path(request.model_path))


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


def _read_request(stream: BinaryIO) -> protocol.WorkerRequest | None:
    header = stream.read(protocol.HEADER_BYTES)
    if not header or header == protocol.HEARTBEAT:  # the driver dismisses this rank
        return None
    body = _exactly(stream, protocol.body_length(header)) if len(header) == protocol.HEADER_BYTES else b""
    if not body:
        raise TrainError("the request stream ended in the middle of a frame: the driver has ended")
    return protocol.decode_request(body)


def _exactly(stream: BinaryIO, count: int) -> bytes:
    body = stream.read(count)
    return body if len(body) == count else b""


if __name__ == "__main__":
    main()
