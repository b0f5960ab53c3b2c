"""Every pass is computed once, and all ranks compute as many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.packing import deal, sorted_microbatches


@given(lengths=st.lists(st.integers(1, 50), max_size=20), world=st.integers(1, 9), budget=st.integers(1, 120))
def test_each_pass_is_computed_once_and_fillers_even_out(lengths: list[int], world: int, budget: int) -> None:
    plan = sorted_microbatches(lengths, budget) if lengths else []
    dealt = [deal(plan, lengths, rank, world) for rank in range(world)]

    assert len({len(passes) for passes in dealt}) == 1
    real = [each.samples for passes in dealt for each in passes if not each.is_filler]
    assert sorted(real) == sorted(plan)
    for passes in dealt:
        for each in passes:
            assert each.samples
            if each.is_filler:
                assert lengths[each.samples[0]] == min(lengths)
