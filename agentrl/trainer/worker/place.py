"""The rank of a trainer process, from its command line or its scheduler, and its connections to the other ranks."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from agentrl.errors import ConfigError, InvariantError
from agentrl.processes.joining import Seat, join_at, numbers_in
from agentrl.processes.machine import interface_of

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

RANK_JOIN_S = 1800.0
"""Seconds that a rank tries to join: its scheduler may start it long before the driver runs, or runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The rank of a trainer process, and how it meets the others."""

    rank: int = 0
    world: int = 1
    store: str = ""
    """File through which the processes find each other; empty for a process that is alone, or that has a `seat`."""
    local: int | None = None
    """Its number on its machine; None: all ranks are on this machine."""
    seat: Seat | None = None
    """Its connection to the driver, if it joined over TCP."""

    def arguments(self) -> list[str]:
        """Return the arguments that `parse` reads."""
        return [f"--rank={self.rank}", f"--world={self.world}", f"--store={self.store}"] if self.world > 1 else []

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Self:
        """Return the place that `arguments` give; without any the process is alone."""
        given: dict[str, str] = {}
        for argument in arguments:
            name, _, value = argument.removeprefix("--").partition("=")
            given[name] = value
        try:
            return cls(rank=int(given["rank"]), world=int(given["world"]), store=given["store"]) if given else cls()
        except (KeyError, ValueError) as error:
            raise InvariantError(f"a trainer process was started with {list(arguments)}: {error}") from error

    @classmethod
    def joined(cls, address: str, environment: MutableMapping[str, str]) -> Self:
        """Join the driver at `HOST:PORT`; the environment says which rank this is, and holds the token, which is removed."""
        numbers = numbers_in(environment)
        seat = join_at(address, environment, numbers, RANK_JOIN_S)
        if (interface := interface_of(seat.address)) is not None:
            # A host name often stands for 127.0.1.1, and gloo would listen there.
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", interface)
        return cls(rank=numbers.rank, world=numbers.world, local=numbers.local, seat=seat)

    def open_store(self) -> dist.Store:
        import torch.distributed as dist

        if self.seat is None:
            return dist.FileStore(self.store, self.world) if self.store else dist.HashStore()
        host, port, listener = self.seat.store_host, self.seat.store_port, self.seat.listener
        if listener is None:
            return dist.TCPStore(host, port, self.world, False, wait_for_workers=False)
        # The store's own socket would listen on every interface.
        return dist.TCPStore(
            host, port, self.world, True, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )

    def device_of(self, device: torch.device) -> torch.device:
        """Return the device of this rank: with several on GPUs, that many after `device` on each machine, else `device`.

        A ConfigError for a GPU that does not exist comes on every rank of the machine, so that none waits for another.
        """
        import torch

        if device.type != "cuda" or self.world == 1:
            return device
        first, count = device.index or 0, torch.cuda.device_count()
        if self.local is not None:
            if count == 1:  # the scheduler shows each process a GPU of its own
                return torch.device("cuda", 0)
            if first + self.local >= count:
                raise ConfigError(
                    f"trainer.parallel: rank {self.rank} is number {self.local} on its machine, which has {count} GPUs; "
                    "start at most one rank for each GPU"
                )
            return torch.device("cuda", first + self.local)
        if first + self.world > count:
            raise ConfigError(
                f"trainer.parallel: {self.world} GPUs from cuda:{first} are needed, this machine has {count}; lower dp"
            )
        return torch.device("cuda", first + self.rank)
