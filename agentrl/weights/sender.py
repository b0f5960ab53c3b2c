"""The trainer as rank 0 of one process group per server: gathers weights into buckets and broadcasts them.

Invariant: every group is sent the same bytes in the same order: those the weights have from `begin` to `finish`. Each group
has a thread of its own, so that a server that is slow, stopped or dead delays nobody else, and nothing here waits for such a
thread longer than the timeout of a collective.

While one bucket is on the wire, the thread gathers the next (casts it, copies it to where the backend sends from) into its
other buffer.

Which tensors travel together.

Invariant: every tensor is in exactly one bucket, in the order given; a bucket has one dtype, so that each tensor in it is
aligned, and more bytes than the limit only if it holds a single tensor.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
from torch import Tensor, distributed

from agentrl.errors import ConfigError, InvariantError
from agentrl.weights.config import SyncConfig
from agentrl.weights.process_group import ProcessGroup, connect, listen
from agentrl.weights.tensors import tensor_checksum
from agentrl.weights.types import WIRE_DTYPES, Bucket, GroupAddress, GroupRequest, Manifest, TensorSpec


def plan_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> tuple[Bucket, ...]:
    """Return `specs` cut into buckets of at most `max_bytes`.

    Example:
        >>> norm, head = TensorSpec("norm", "float32", (8,)), TensorSpec("head", "float32", (8, 8))
        >>> [[spec.name for spec in bucket] for bucket in plan_buckets([norm, norm, head, norm], 64)]
        [['norm', 'norm'], ['head'], ['norm']]
    """
    buckets: list[list[TensorSpec]] = []
    room = -1
    for spec in specs:
        if not buckets or spec.num_bytes > room or spec.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(spec)
        room -= spec.num_bytes
    return tuple(tuple(bucket) for bucket in buckets)


@dataclass(slots=True, eq=False)
class _Job:
    """One version for one group."""

    buckets: Sequence[Bucket]
    tensors: Mapping[str, Tensor]
    go: threading.Event = field(default_factory=threading.Event)
    """Set when the server receives, or when it is not to be sent anything."""
    ended: threading.Event = field(default_factory=threading.Event)
    failure: str | None = None


class _Peer:
    """One group and the thread that joins it and sends to it."""

    def __init__(self, request: GroupRequest, config: SyncConfig, device: torch.device) -> None:
        self.closed = False
        self._timeout = timedelta(seconds=config.timeout_s)
        self._flat = request.flat
        backend = _backend(request, config, device)
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self._device)] * 2
        try:
            store = listen(config.address, self._timeout)
            self.address = GroupAddress(request.name, config.address, store.port, 1 + request.ranks, backend)
            # Not in the thread: a connection under way when the store goes would be tried again until it times out.
            own = connect(self.address, self._timeout)
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"sync.address: cannot listen on {config.address}: {error}") from error
        self._store: distributed.TCPStore | None = store
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._serve, args=(own,), name=f"sender {request.name}", daemon=True)
        self.thread.start()

    def submit(self, job: _Job) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Leave the group, or no longer wait for it; a thread that is sending does so when that ends or times out."""
        self.closed = True
        self._store = None
        self._jobs.put(None)

    def _serve(self, store: distributed.TCPStore) -> None:
        group, failure = None, None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            group = ProcessGroup(store, self.address, 0, self._timeout)
        except RuntimeError as error:  # what torch raises, here and below
            failure = f"the server did not join its group: {error}"
        while (job := self._jobs.get()) is not None:
            job.failure = failure
            if group is not None and failure is None:
                try:
                    self._send(job, group)
                except RuntimeError as error:
                    job.failure = failure = f"sending to the server failed: {error}"
            job.ended.set()
        if group is not None:
            group.close()

    def _send(self, job: _Job, group: ProcessGroup) -> None:
        size = max((sum(spec.num_bytes for spec in bucket) for bucket in job.buckets), default=0)
        if size > len(self._buffers[0]):
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        on_the_wire: list[distributed.Work] = []
        for number, bucket in enumerate(job.buckets):
            views = _gather(bucket, job.tensors, self._buffers[number % 2])
            group.wait(on_the_wire)
            job.go.wait()
            if self.closed:
                return
            on_the_wire = group.broadcast([_joined(views, self._buffers[number % 2])] if self._flat else views)
        group.wait(on_the_wire)


class WeightSender:
    """All groups of a trainer. Not thread-safe."""

    def __init__(self, config: SyncConfig, device: torch.device) -> None:
        """Begin without groups; `device` is where the weights are."""
        self._config, self._device = config, device
        self._peers: dict[str, _Peer] = {}
        self._jobs: dict[str, _Job] = {}
        self.sending = False
        """Whether the weights must not change now."""

    def open(self, requests: Sequence[GroupRequest], keep: Collection[str]) -> list[GroupAddress]:
        """Listen for new servers, close the groups that are not in `keep`, and return where the servers join.

        Raises:
            ConfigError: the address is not this machine's, or the backend cannot be used.
        """
        self._close(self._peers.keys() - set(keep))
        for request in requests:
            self._peers[request.name] = _Peer(request, self._config, self._device)
        return [self._peers[request.name].address for request in requests]

    def begin(
        self, version: int, tensors: Mapping[str, Tensor], groups: Sequence[str], *, dtype: str, digests: bool
    ) -> Manifest:
        """Plan the buckets of `tensors`, which must not change until `finish`, and gather the first for each group.

        Args:
            version: what they are called.
            tensors: weights by HF name.
            groups: whom they may be sent to.
            dtype: what they are sent in.
            digests: whether the manifest is to have the checksums of what is sent.

        Raises:
            InvariantError: something is being sent already, or a group is not open.
        """
        if self.sending or not self._peers.keys() >= set(groups):
            raise InvariantError(f"sending: {self.sending}; groups {groups} of {list(self._peers)}: open them, finish first")
        specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        buckets = plan_buckets(specs, self._config.bucket_mb << 20)
        self._jobs = {name: _Job(buckets, tensors) for name in groups}
        for name, job in self._jobs.items():
            self._peers[name].submit(job)
        self.sending = True
        # Here and not beside the sending: the servers still sample, but stand still while they are sent to.
        return Manifest(version, buckets, {spec.name: _sent_checksum(spec, tensors) for spec in specs if digests})

    def start(self, groups: Sequence[str]) -> None:
        """Send to these groups; their servers receive."""
        for name in groups:
            self._jobs[name].go.set()

    def finish(self, abandoned: Collection[str]) -> dict[str, str]:
        """Close the abandoned groups, wait for the others, and let the weights change again; return what went wrong.

        That is by group. One that was not abandoned and is not done within the timeout has gone wrong, and is closed too.
        """
        self._close(abandoned)
        failures: dict[str, str] = {}
        deadline = time.monotonic() + self._config.timeout_s
        for name, job in self._jobs.items():
            if name in self._peers:
                job.go.set()
                if not job.ended.wait(max(0.0, deadline - time.monotonic())):
                    failures[name] = f"not all was sent after {self._config.timeout_s:g} s (sync.timeout_s)"
                elif job.failure is not None:
                    failures[name] = job.failure
        self._close(failures)
        self._jobs, self.sending = {}, False
        return failures

    def close(self) -> None:
        """Close all groups, and wait a moment for their threads: one that wakes while the interpreter ends aborts it."""
        threads = [peer.thread for peer in self._peers.values()]
        self._close(list(self._peers))
        for thread in threads:
            thread.join(1.0)

    def _close(self, names: Collection[str]) -> None:
        for name in [name for name in names if name in self._peers]:
            self._peers.pop(name).close()
            if name in self._jobs:
                self._jobs[name].go.set()


def _sent_checksum(spec: TensorSpec, tensors: Mapping[str, Tensor]) -> str:
    sent = tensors[spec.name].to("cpu", getattr(torch, spec.dtype)).contiguous().reshape(-1)
    data = sent.view(torch.uint8).numpy().data
    return tensor_checksum(spec.name, WIRE_DTYPES[spec.dtype][0], spec.shape, data)


def _backend(request: GroupRequest, config: SyncConfig, device: torch.device) -> Literal["gloo", "nccl"]:
    possible = request.nccl and device.type == "cuda"
    if config.backend == "nccl" and not possible:
        raise ConfigError(f"sync.backend: nccl joins GPUs, but trainer ({device}) or server is on none; set gloo or auto")
    return "gloo" if config.backend == "gloo" or not possible else "nccl"


def _gather(bucket: Bucket, tensors: Mapping[str, Tensor], buffer: Tensor) -> list[Tensor]:
    """Copy a bucket's tensors, cast, into `buffer`, and return them as views of it."""
    views: list[Tensor] = []
    at = 0
    with torch.no_grad():
        for spec in bucket:
            view = buffer[at : at + spec.num_bytes].view(getattr(torch, spec.dtype)).reshape(spec.shape)
            view.copy_(tensors[spec.name])
            views.append(view)
            at += spec.num_bytes
    return views


def _joined(views: Sequence[Tensor], buffer: Tensor) -> Tensor:
    """Return the part of `buffer` that the views cover."""
    return buffer[: sum(view.numel() * view.element_size() for view in views)]
