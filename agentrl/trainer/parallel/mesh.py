"""The device meshes of a trainer: over what its weights, its sequences and its matrix products are split.

Invariant: every rank makes the same meshes in the same order. The dimensions are those of `MeshShape` that split anything,
and `dp`; where sequences are cut, FSDP splits weights over dp and cp together, in one dimension `dp_cp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.trainer.parallel.shape import MeshShape


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


def make_mesh(shape: MeshShape, rank: int, device: torch.device) -> TrainerMesh:
    """Return the meshes of `rank`; every rank must call it.

    Args:
        shape: of the mesh; its world is the number of processes of the default group.
        rank: of this process.
        device: on which this process computes.
    """
    sharded = "dp" if shape.cp == 1 else "dp_cp"
    axes = {"replicate": shape.replicate, sharded: shape.shards, "tp": shape.tp}
    kept = {name: ways for name, ways in axes.items() if ways > 1 or name == sharded}
    root = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    weights = root["replicate", sharded] if shape.replicate > 1 else root[sharded]
    return TrainerMesh(shape=shape, weights=weights, tp=root["tp"] if shape.tp > 1 else None, cp=_cp_group(shape, rank))


def _cp_group(shape: MeshShape, rank: int) -> dist.ProcessGroup | None:
    if shape.cp == 1:
        return None
    blocks = sorted({shape.cp_peers(each) for each in range(shape.world)})
    groups = [dist.new_group(list(block)) for block in blocks]  # each rank takes part in the making of every group
    mine = groups[blocks.index(shape.cp_peers(rank))]
    assert isinstance(mine, dist.ProcessGroup)
    return mine
