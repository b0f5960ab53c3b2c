"""How tensors are cut into buckets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentrl.weights.sender import plan_buckets
from agentrl.weights.types import WIRE_DTYPES, TensorSpec

KINDS = st.lists(st.tuples(st.sampled_from(sorted(WIRE_DTYPES)), st.lists(st.integers(0, 6), max_size=3)), max_size=30)
Kinds = list[tuple[str, list[int]]]


def named(kinds: Kinds) -> list[TensorSpec]:
    return [TensorSpec(f"t{number}", dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)]


@given(KINDS, st.integers(1, 400))
def test_buckets_keep_the_order_and_lose_nothing(kinds: Kinds, limit: int) -> None:
    specs = named(kinds)
    buckets = plan_buckets(specs, limit)
    assert [spec for bucket in buckets for spec in bucket] == specs
    for bucket in buckets:
        assert bucket
        assert len({spec.dtype for spec in bucket}) == 1
        assert len(bucket) == 1 or sum(spec.num_bytes for spec in bucket) <= limit


@given(KINDS, st.integers(1, 400))
def test_no_two_neighbours_fit_one_bucket(kinds: Kinds, limit: int) -> None:
    specs = named(kinds)
    buckets = plan_buckets(specs, limit)
    for before, after in pairwise(buckets):
        size = sum(spec.num_bytes for spec in before) + after[0].num_bytes
        assert size > limit or before[0].dtype != after[0].dtype
