"""The processes of one trainer, their device meshes, and their exchanges.

Invariant: every rank makes the same meshes and takes part in every exchange, in the same order. Exchanges run on separate
gloo groups: ranks wait for the driver's next request on a group whose timeout is a year; all other groups have the timeout
`trainer.collective_timeout_s`, so no rank waits longer for a stopped one. Nothing that crosses a rank boundary is pickled.
Ranks that get the same samples compute the same numbers; only those of the first of them count. An error of one rank is the
error of all, so no rank continues or waits in an exchange that another has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from agentrl.errors import AgentRLError, TrainError, error_named
from agentrl.trainer.parallel.shape import Axis, MeshShape
from agentrl.types import Float32Array

_IDLE: Final = timedelta(days=365)
Result = TypeVar("Result")


class Ranks:
    """A trainer of one process: every exchange returns its own argument."""

    rank = 0
    world = 1
    data_rank = 0
    """Ranks of the same number get the same samples."""
    data_world = 1
    """Number of groups of ranks that get different samples."""
    averaged = 1
    """Number of ranks whose gradients FSDP averages."""

    def mesh(self, device: torch.device) -> TrainerMesh | None:
        """Return the meshes over which the model is split, or None; every rank must call it, once."""
        del device
        return None

    def share(self, body: bytes | None) -> bytes:
        """Return the bytes that rank 0 gives; the other ranks give None."""
        assert body is not None
        return body

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, in order."""
        return [data]

    def first_error(self, error: str | None) -> str | None:
        """Return the error of the lowest rank that has one."""
        texts = [text.decode() for text in self.gather((error or "").encode())]
        return next((text for text in texts if text), None)

    def beside(self) -> Ranks:
        """Duplicate the ranks' group for use in another thread; every rank must call it."""
        return self

    def add(self, values: Tensor) -> Tensor:
        """Return the sum of the tensors of all samples, on the CPU."""
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Return the largest of the ranks' tensors, element by element, on the CPU."""
        return values

    def merge(self, values: Float32Array) -> Float32Array:
        """Return [n] float32 whose every element the ranks of one data rank computed; the others give 0 there."""
        return values

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Return the CPU tensors of all ranks, of one type and shape, by rank."""
        return [own]

    def collected(self, own: Tensor) -> list[Tensor]:
        """Return on rank 0 the tensors of all ranks, of one type and shape, on the model's device; the other ranks get none.

        It is a collective of the model, with its timeout.
        """
        return [own]


class ManyRanks(Ranks):
    """One of several processes."""

    def __init__(
        self, rank: int, shape: MeshShape, *, idle: dist.ProcessGroup, control: dist.ProcessGroup, timeout: timedelta
    ) -> None:
        """Use the group `idle` to wait for rank 0 and `control` for the rest; the model's groups fail after `timeout`."""
        self.rank, self.world = rank, shape.world
        self.data_rank, self.data_world, self.averaged = shape.data_rank(rank), shape.data_world, shape.averaged
        self._shape = shape
        self._idle = idle
        self._control = control
        self._timeout = timeout

    def mesh(self, device: torch.device) -> TrainerMesh:
        return make_mesh(self._shape, self.rank, device, self._timeout)

    def share(self, body: bytes | None) -> bytes:
        """Broadcast rank 0's bytes: first their number, for which the others wait as long as it takes, then the bytes."""
        size = torch.tensor([0 if body is None else len(body)])
        dist.broadcast(size, 0, group=self._idle)
        if not int(size):
            return b""
        # The kernel takes a few bytes for a stopped rank too; an exchange that needs its answer fails.
        self.gathered(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        if body:
            data.copy_(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        dist.broadcast(data, 0, group=self._control)
        return data.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Gather first the lengths, then buffers of the longest one."""
        lengths = [int(length) for length in self.gathered(torch.tensor([len(data)]))]
        if not max(lengths):
            return [b""] * self.world
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        if data:
            own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [every[:length].numpy().tobytes() for every, length in zip(self.gathered(own), lengths, strict=True)]

    def beside(self) -> ManyRanks:
        group = _gloo_group(_IDLE)  # a rank's disk may be slow, and the driver's wait for the thread has a deadline
        return ManyRanks(self.rank, self._shape, idle=group, control=group, timeout=self._timeout)

    def gathered(self, own: Tensor) -> list[Tensor]:
        every = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(every, own, group=self._control)
        return every

    def collected(self, own: Tensor) -> list[Tensor]:
        every = [torch.empty_like(own) for _ in range(self.world)] if self.rank == 0 else []
        dist.gather(own, every or None, 0)
        return every

    def add(self, values: Tensor) -> Tensor:
        """Sum over the first rank of each data rank, so that each sample counts once; every rank gets the same bits."""
        total = values.detach().cpu().clone()
        if not self._shape.leads(self.rank):
            total.zero_()
        dist.all_reduce(total, dist.ReduceOp.SUM, group=self._control)
        return total

    def maximum(self, values: Tensor) -> Tensor:
        largest = values.detach().cpu().clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._control)
        return largest

    def merge(self, values: Float32Array) -> Float32Array:
        """Sum over the data ranks: x + 0 is x."""
        return self.add(torch.from_numpy(np.ascontiguousarray(values))).numpy()


@contextmanager
def joined(store: dist.Store, rank: int, shape: MeshShape, *, device: torch.device, timeout_s: float) -> Generator[Ranks]:
    """Join the processes that share `store`, and leave them at the end of the block.

    `device` decides the backend, `gloo` or `nccl`; joining (RuntimeError) and each collective fail after `timeout_s`.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=shape.world, timeout=timeout)
    try:
        yield ManyRanks(rank, shape, idle=_gloo_group(_IDLE), control=_gloo_group(timeout), timeout=timeout)
    except BaseException:
        if shape.world == 1:  # with several, the end of this process frees the others; leaving would wait for them
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _gloo_group(timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMesh:
    """The device meshes of one rank.

    Dimensions are those of `MeshShape` that split anything, and `dp`. Where sequences are cut, FSDP splits weights over dp
    and cp together, in one dimension `dp_cp`.
    """

    shape: MeshShape
    weights: DeviceMesh
    """For FSDP: `dp` or `dp_cp`, after `replicate` where there are copies."""
    tp: DeviceMesh | None
    """For matrix products, of the same root mesh as `weights`; None where they are whole."""
    cp: dist.ProcessGroup | None
    """The ranks that hold the parts of the same sequences, in order; None where sequences are whole."""


def make_mesh(shape: MeshShape, rank: int, device: torch.device, timeout: timedelta) -> TrainerMesh:
    """Return the meshes of `rank`, whose groups fail after `timeout`; every rank must call it."""
    sharded = "dp" if shape.cp == 1 else "dp_cp"
    axes: dict[str, Axis] = {"replicate": "replicate", sharded: "shards", "tp": "tp"}
    ways = {name: getattr(shape, axis) for name, axis in axes.items()}
    kept = [name for name in axes if ways[name] > 1 or name == sharded]
    root = DeviceMesh.from_group(
        [_group_along(shape, axes[name], rank, timeout) for name in kept],
        device.type,
        mesh=torch.arange(shape.world).reshape([ways[name] for name in kept]),
        mesh_dim_names=tuple(kept),
    )
    return TrainerMesh(
        shape=shape,
        weights=root["replicate", sharded] if shape.replicate > 1 else root[sharded],
        tp=root["tp"] if shape.tp > 1 else None,
        cp=_group_along(shape, "cp", rank, timeout) if shape.cp > 1 else None,
    )


def _group_along(shape: MeshShape, axis: Axis, rank: int, timeout: timedelta) -> dist.ProcessGroup:
    peers = shape.peers(axis)
    groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in peers]  # each rank takes part in making every group
    [mine] = [group for ranks, group in zip(peers, groups, strict=True) if rank in ranks]
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def together(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Return the result of `action`, which every rank must run; the error of the lowest rank is raised on all."""
    results: list[Result] = []
    problem = None
    try:
        results.append(action())
    except AgentRLError as error:
        problem = f"{type(error).__name__}: {error}"
    first = ranks.first_error(problem)
    if first is not None:
        kind, _, message = first.partition(": ")
        raise error_named(kind, message) or TrainError(f"{kind}: {message}")
    return results[0]
