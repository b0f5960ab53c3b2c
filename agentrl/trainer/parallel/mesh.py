"""The device meshes of a trainer: over what its weights, its sequences and its matrix products are split.

Invariant: every rank makes the same meshes in the same order. The dimensions are those of `MeshShape` that split anything,
and `dp`; where sequences are cut, FSDP splits weights over dp and cp together, in one dimension `dp_cp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agentrl.trainer.parallel.shape import Axis, MeshShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMesh:
    """The meshes of one rank."""

    shape: MeshShape
    weights: DeviceMesh
    """What FSDP splits weights over: `dp` or `dp_cp`, after `replicate` where there are copies."""
    tp: DeviceMesh | None
    """What matrix products are split over: `tp`, of the same root mesh as `weights`; None where they are whole."""
    cp: dist.ProcessGroup | None
    """The ranks that hold the parts of the same sequences, in their order; None where sequences are whole."""


def make_mesh(shape: MeshShape, rank: int, device: torch.device, timeout: timedelta) -> TrainerMesh:
    """Return the meshes of `rank`; every rank must call it.

    Args:
        shape: of the mesh; its world is the number of processes of the default group.
        rank: of this process.
        device: on which this process computes.
        timeout: after which an exchange of any group fails; torch gives new groups its own.
    """
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
    """Return the ranks that differ from `rank` in `axis` alone, in their order."""
    peers = shape.peers(axis)
    groups = [dist.new_group(list(ranks), timeout=timeout) for ranks in peers]  # each rank takes part in making every group
    [mine] = [group for ranks, group in zip(peers, groups, strict=True) if rank in ranks]
    assert isinstance(mine, dist.ProcessGroup)
    return mine
