"""A torch process group of a trainer and one server, made so that SGLang's own servers can be members.

Invariant: the trainer's store and gloo sockets listen on the group's address only; no operation outlasts its timeout; when
the last reference to a `ProcessGroup` goes, its connections are closed, which ends what the other side waits for.

SGLang's `init_custom_process_group` puts a group's keys under the prefixes `NAME`, `NAME/` and `DEVICE/`; the last two are
those of torch's own helper for every group since torch 2.0. The same is done here with stores and backends alone, so that
any number of groups can live in a process that has no default group.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch.distributed as dist
from torch import Tensor

from agentrl.weights.types import GroupAddress, is_loopback


class _Backend(Protocol):
    def broadcast(self, tensors: list[Tensor], options: dist.BroadcastOptions) -> dist.Work: ...


class ProcessGroup:
    """This process's membership in a group; `join` makes one. Blocks the calling thread, not the interpreter."""

    def __init__(self, store: dist.Store, address: GroupAddress, rank: int, timeout: timedelta) -> None:
        """Join as `rank`; returns when all have."""
        self._timeout = timeout
        self._abort: Callable[[], None] | None = None
        device = "cpu" if address.backend == "gloo" else "cuda"
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
            backend = dist.ProcessGroupNCCL(store, rank, address.world_size, settings)
            self._abort = backend.abort
        self._backend: _Backend = cast("_Backend", backend)

    def broadcast(self, tensors: Sequence[Tensor]) -> list[dist.Work]:
        """Begin to send (rank 0) or receive (others) contiguous tensors, one after the other; `wait` for the result."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        return [self._backend.broadcast([tensor], options) for tensor in tensors]

    def wait(self, works: Sequence[dist.Work]) -> None:
        """Return when what `broadcast` began is done.

        Raises:
            RuntimeError: the other side is gone, or it took longer than the timeout.
        """
        for work in works:
            work.wait(self._timeout)

    def close(self) -> None:
        """Leave a NCCL group whatever is under way in it; gloo closes its connections when the group is forgotten."""
        if self._abort is not None:
            self._abort()


def listen(host: str, timeout: timedelta) -> dist.TCPStore:
    """Return a new store on a free port of `host`, through which the ranks of one group, 0 too, find each other.

    It listens until its last reference goes, which also ends what waits for others to join.

    Raises:
        OSError: this machine has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    # The store's own socket would listen on every interface.
    return dist.TCPStore(
        host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
    )


def connect(address: GroupAddress, timeout: timedelta) -> dist.TCPStore:
    """Return a connection to the store of a group; when the store goes, whatever uses it fails at once.

    Raises:
        RuntimeError: there is no store within `timeout`; one that goes meanwhile is waited for too.
    """
    return dist.TCPStore(address.host, address.port, None, False, timeout, wait_for_workers=False)


def join(address: GroupAddress, rank: int, timeout: timedelta) -> ProcessGroup:
    """Return the group, once all ranks have joined.

    Raises:
        RuntimeError: its store is not there, or goes before the group is complete, or it is not within `timeout`.
    """
    return ProcessGroup(connect(address, timeout), address, rank, timeout)


def _gloo_device(host: str, rank: int) -> object:
    """Return the interface gloo's own sockets use: the group's address where it is this machine's, else gloo's choice."""
    gloo = dist.ProcessGroupGloo
    return gloo.create_device(hostname=host) if rank == 0 or is_loopback(host) else gloo.create_default_device()
