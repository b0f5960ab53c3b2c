"""The arithmetic of a mesh: each rank has one place, and peers agree on who they are."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.trainer.parallel.shape import Axis, MeshShape

_WAYS = st.integers(1, 5)
_SHAPES = st.builds(MeshShape, replicate=_WAYS, dp=_WAYS, cp=_WAYS, tp=_WAYS)


@given(_SHAPES)
def test_ranks_are_numbered_row_by_row_over_the_four_axes(shape: MeshShape) -> None:
    axes = (shape.replicate, shape.dp, shape.cp, shape.tp)
    assert shape.world == int(np.prod(axes))
    for rank in range(shape.world):
        replicate, dp, cp, tp = (int(at) for at in np.unravel_index(rank, axes))
        assert shape.data_rank(rank) == replicate * shape.dp + dp
        assert shape.leads(rank) == (cp == 0 and tp == 0)


@given(_SHAPES)
def test_each_sample_group_has_the_same_number_of_ranks_and_one_that_counts(shape: MeshShape) -> None:
    ranks = range(shape.world)
    groups = Counter(shape.data_rank(rank) for rank in ranks)
    assert groups == dict.fromkeys(range(shape.data_world), shape.cp * shape.tp)
    assert [shape.data_rank(rank) for rank in ranks if shape.leads(rank)] == list(range(shape.data_world))


@given(_SHAPES, st.sampled_from(["replicate", "shards", "cp", "tp"]))
def test_peers_differ_in_one_axis_and_each_rank_has_one_group(shape: MeshShape, axis: Axis) -> None:
    grid = {"replicate": shape.replicate, "shards": shape.shards, "tp": shape.tp}
    if axis == "cp":
        grid = {"replicate": shape.replicate, "dp": shape.dp, "cp": shape.cp, "tp": shape.tp}
    ranks = np.moveaxis(np.arange(shape.world).reshape(*grid.values()), list(grid).index(axis), -1)
    assert sorted(shape.peers(axis)) == sorted(map(tuple, ranks.reshape(-1, ranks.shape[-1]).tolist()))


@given(_SHAPES)
def test_the_parts_of_a_sequence_are_on_ranks_with_the_same_samples(shape: MeshShape) -> None:
    for peers in shape.peers("cp"):
        assert len({shape.data_rank(peer) for peer in peers}) == 1


@given(_SHAPES)
def test_a_mesh_names_what_it_splits(shape: MeshShape) -> None:
    named = str(shape).split(" x ")
    assert int(np.prod([int(part.split()[1]) for part in named])) == shape.world
