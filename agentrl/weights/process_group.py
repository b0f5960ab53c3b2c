"""A torch process group of a trainer and one server, made so that SGLang's own servers can be members.

Invariant: the trainer's store and gloo sockets listen on the group's address only. No operation outlasts its timeout. When
the last reference to a `ProcessGroup` is dropped, its connections close, which ends the waits of the other side.

As in SGLang's `init_custom_process_group`, keys stand under the prefixes `NAME`, `NAME/` and `DEVICE/`; a process without
a default group can have any number of groups.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

from agentrl.processes.machine import is_loopback
from agentrl.weights.types import GroupAddress


class _Backend(Protocol):
    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...


class ProcessGroup:
    """This process's membership in a group; `join` makes one. Its calls block their thread, not the interpreter."""

    def __init__(self, store: dist.Store, address: GroupAddress, rank: int, timeout: timedelta) -> None:
        self._timeout = timeout
        self._abort: Callable[[], None] | None = None
        device = "cpu" if address.backend == "gloo" else "cuda"
        # SGLang puts its keys under these three prefixes; a rank with others would never meet it.
        for prefix in (address.name, f"{address.name}/", f"{device}/"):
            store = dist.PrefixStore(prefix, store)
        if address.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore - the only way to choose the interface
            options._devices = [_gloo_device(address.host, rank)]
            options._timeout = timeout
            backend = dist.ProcessGroupGloo(store, rank, address.world_size, options)
        else:
            settings = dist.ProcessGroupNCCL.Options()
            settings._timeout = timeout  # pyright: ignore[reportPrivateUsage] - torch has no public name for it
            with _errors_stay_in_the_group():
                backend = dist.ProcessGroupNCCL(store, rank, address.world_size, settings)
            self._abort = backend.abort
        self._backend: _Backend = cast("_Backend", backend)

    def broadcast(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Start to send (rank 0) or receive (other ranks) contiguous tensors, in order; `wait` for the works returned."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        return [self._backend.broadcast([tensor], options) for tensor in tensors]

    def wait(self, works: Sequence[dist.Work]) -> None:
        for work in works:
            work.wait(self._timeout)

    def close(self) -> None:
        """Leave a NCCL group at once; gloo closes its connections when the last reference is dropped."""
        if self._abort is not None:
            self._abort()


def listen(host: str, timeout: timedelta) -> dist.TCPStore:
    """Return a new store on a free port of `host`; dropping its last reference ends it, and the waits for others to join."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    # The store's own socket would listen on every interface.
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def connect(address: GroupAddress, timeout: timedelta) -> dist.TCPStore:
    """Return a connection to the store of a group; its users fail at once when the store closes."""
    return dist.TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)


def join(address: GroupAddress, rank: int, timeout: timedelta) -> ProcessGroup:
    """Return the group, once all ranks have joined."""
    return ProcessGroup(connect(address, timeout), address, rank, timeout)


_ENVIRONMENT = threading.Lock()
"""Held while the environment differs: each server's group is made in a thread of its own."""


@contextmanager
def _errors_stay_in_the_group() -> Generator[None]:
    """Let a NCCL group that is made in the block clean itself up after a timeout, instead of ending this process.

    The groups in which ranks train must not: a rank whose collective timed out would train on with what it received.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    with _ENVIRONMENT:
        before = os.environ.get(name)
        os.environ[name] = "2"  # CleanUpOnly
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _gloo_device(host: str, rank: int) -> object:
    """Return the interface of gloo's sockets: the group's address where it is this machine's, else gloo's default."""
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(hostname=host) if rank == 0 or is_loopback(host) else gloo.create_default_device()
