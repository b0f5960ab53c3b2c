"""The trainer as rank 0 of one process group per server: gathers weights into buckets and broadcasts them.

Invariant: every group of a manifest gets the same bytes in the same order: those of the tensors given to `begin`. Each
tensor is in exactly one bucket, in the order given. Each group has its own thread, so a slow, stopped or dead server
delays no other, and no caller waits for such a thread longer than the timeout of a collective. While one bucket is on the
wire, the thread gathers the next.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
from torch import Tensor, distributed

from agentrl.errors import ConfigError, InvariantError
from agentrl.weights.config import SyncConfig
from agentrl.weights.process_group import ProcessGroup, connect, listen
from agentrl.weights.tensors import tensor_checksum
from agentrl.weights.types import WIRE_DTYPES, Bucket, GroupAddress, GroupRequest, Manifest, TensorSpec

_DIGEST_THREADS = 8
"""Each computes the digest of one tensor, at about a gigabyte a second, and holds a copy of it in the type that is sent."""


def plan_buckets(specs: Iterable[TensorSpec], max_bytes: int) -> tuple[Bucket, ...]:
    """Return `specs` cut into buckets of one dtype, so aligned, of at most `max_bytes` or of one larger tensor."""
    buckets: list[list[TensorSpec]] = []
    room = -1
    for spec in specs:
        if not buckets or spec.num_bytes > room or spec.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = max_bytes
        buckets[-1].append(spec)
        room -= spec.num_bytes
    return tuple(tuple(bucket) for bucket in buckets)


def plan_sending(version: int, tensors: Mapping[str, Tensor], *, dtype: str, bucket_mb: int) -> Manifest:
    """Return the buckets of `tensors`, by HF name, in their order, and their digests as sent in `dtype` of `WIRE_DTYPES`."""
    specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with ThreadPoolExecutor(min(_DIGEST_THREADS, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(partial(_sent_checksum, tensors=tensors), specs))
    named = {spec.name: digest for spec, digest in zip(specs, digests, strict=True)}
    return Manifest(version, plan_buckets(specs, bucket_mb << 20), named)


@dataclass(slots=True, eq=False)
class _Job:
    """One version for one group."""

    buckets: Sequence[Bucket]
    tensors: Mapping[str, Tensor]
    go: threading.Event = field(default_factory=threading.Event)
    """Set when the server is receiving, or when the thread must not send."""
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
            # Not in the thread: a connection in progress when the store closes would be retried until it times out.
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
        self.closed = True
        self._store = None
        self._jobs.put(None)

    def _serve(self, store: distributed.TCPStore) -> None:
        group, failure = None, None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        try:
            group = ProcessGroup(store, self.address, 0, self._timeout)
        except RuntimeError as error:  # torch raises it here and below
            failure = f"the server did not join its group: {error}"
        while (job := self._jobs.get()) is not None:
            job.failure = failure
            if group is not None and failure is None:
                try:
                    self._send(job, group)
                except RuntimeError as error:
                    job.failure = failure = f"sending to the server failed: {error}"
            job.ended.set()
            del job  # it refers to the weights, whose memory is free from now on
        if group is not None:
            group.close()

    def _send(self, job: _Job, group: ProcessGroup) -> None:
        # Two buffers are enough: while one is on the wire, the next bucket is copied into the other.
        size = max((sum(spec.num_bytes for spec in bucket) for bucket in job.buckets), default=0)
        if size > len(self._buffers[0]):
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in range(2)]
        on_the_wire: list[distributed.Work] = []
        for number, bucket in enumerate(job.buckets):
            views = _gather(bucket, job.tensors, self._buffers[number % 2])
            # Bucket n must have left before bucket n + 2 is gathered into its buffer.
            group.wait(on_the_wire)
            # The first bucket is gathered while servers pause; it is sent when they receive.
            job.go.wait()
            if self.closed:
                return
            on_the_wire = group.broadcast([_joined(views, self._buffers[number % 2])] if self._flat else views)
        group.wait(on_the_wire)


class WeightSender:
    """The groups of a trainer; threads may share it."""

    def __init__(self, config: SyncConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._peers: dict[str, _Peer] = {}
        self._jobs: dict[str, _Job] = {}
        self._lock = threading.Lock()
        """Guards the two above; held while a group opens, never while weights are sent."""

    @property
    def sending(self) -> bool:
        return bool(self._jobs)

    def open(self, requests: Sequence[GroupRequest], close: Collection[str]) -> list[GroupAddress]:
        """Close the groups in `close`, listen for new servers, and return where these join."""
        with self._lock:
            self._close(close)
            for request in requests:
                self._peers[request.name] = _Peer(request, self._config, self._device)
            return [self._peers[request.name].address for request in requests]

    def begin(self, manifest: Manifest, tensors: Mapping[str, Tensor], groups: Sequence[str]) -> None:
        """Gather the first bucket for each open and idle group; the tensors must not change until `finish`."""
        with self._lock:
            busy = self._jobs.keys() & set(groups)
            if busy or not self._peers.keys() >= set(groups):
                raise InvariantError(
                    f"cannot begin: groups {list(groups)}, open {list(self._peers)}, in use {sorted(busy)}; finish and open "
                    "first"
                )
            for name in groups:
                self._jobs[name] = _Job(manifest.buckets, tensors)
                self._peers[name].submit(self._jobs[name])

    def start(self, groups: Sequence[str]) -> None:
        """Send to these groups, whose servers are receiving."""
        with self._lock:
            for name in groups:
                self._jobs[name].go.set()

    def finish(self, groups: Sequence[str], abandoned: Collection[str] = ()) -> dict[str, str]:
        """Close the `abandoned` groups, wait for the others, close the failed ones, and return their errors by group."""
        with self._lock:
            self._close(abandoned)
            jobs = {name: self._jobs[name] for name in groups if name in self._jobs}
            waited = {name: job for name, job in jobs.items() if name in self._peers}
            failures = dict.fromkeys(jobs.keys() - waited.keys() - set(abandoned), "its group was closed")
            for job in waited.values():
                job.go.set()
        deadline = time.monotonic() + self._config.timeout_s
        for name, job in waited.items():
            # One deadline for all groups: their threads run at the same time.
            if not job.ended.wait(max(0.0, deadline - time.monotonic())):
                failures[name] = f"the sending was not done after {self._config.timeout_s:g} s (sync.timeout_s)"
            elif job.failure is not None:
                failures[name] = job.failure
        with self._lock:
            # A failed group cannot be used again; the server joins another one with its next update.
            self._close(failures)
            for name in jobs:
                self._jobs.pop(name, None)
        return failures

    def close(self) -> None:
        """Close all groups and wait up to 1 s for each thread: one that wakes while the interpreter ends aborts it."""
        with self._lock:
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
        raise ConfigError(
            f"sync.backend: nccl needs GPUs, but the trainer ({device}) or the server has none; set gloo or auto"
        )
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
    return buffer[: sum(view.numel() * view.element_size() for view in views)]
