"""Plans of passes that share prefixes: every token once, in the order of its sequence, within the budget, and cheap."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.prefixes import LEAST_SAVED, TokenTree, plan_passes, token_tree
from agentrl.types import Int32Array

# Few ids and nested choices, so that prefixes are shared at every depth.
ids = st.lists(st.integers(1, 3), min_size=1, max_size=12).map(lambda values: np.array(values, np.int32))
sequences = st.lists(ids, min_size=1, max_size=12)


def attended(tree: TokenTree) -> dict[int, list[int]]:
    """Return for each token of the row the tokens up to it that it attends to, in order."""
    seen: dict[int, list[int]] = {}
    for run in tree.runs:
        before = [at for start, stop in run.prefix for at in range(start, stop)]
        for at in range(run.start, run.stop):
            seen[at] = [*before, *range(run.start, at + 1)]
    return seen


@given(sequences)
def test_a_token_attends_to_its_own_sequence_up_to_it(many: list[Int32Array]) -> None:
    tree = token_tree(many)
    seen = attended(tree)
    assert sorted(seen) == list(range(len(tree.token_ids)))
    for given_ids, places in zip(many, tree.places, strict=True):
        assert tree.token_ids[places].tolist() == given_ids.tolist()
        assert tree.depths[places].tolist() == list(range(len(given_ids)))
        for depth, at in enumerate(places.tolist()):
            assert seen[at] == places[: depth + 1].tolist()


@given(sequences)
def test_a_token_sees_those_before_it_whose_part_of_the_row_holds_it(many: list[Int32Array]) -> None:
    tree = token_tree(many)
    for at, seen in attended(tree).items():
        assert [key for key in range(at + 1) if at < tree.ends[key]] == seen


@given(sequences)
def test_each_prefix_stands_once(many: list[Int32Array]) -> None:
    prefixes = {tuple(one[:stop].tolist()) for one in many for stop in range(1, len(one) + 1)}
    assert len(token_tree(many).token_ids) == len(prefixes)


@given(sequences, st.integers(1, 60), st.booleans())
def test_a_plan_holds_each_sequence_once_within_the_budget(many: list[Int32Array], budget: int, share: bool) -> None:
    plan = plan_passes(many, budget, share=share)
    assert sorted(itertools.chain(*plan.passes)) == list(range(len(many)))
    assert not (plan.shared and not share)
    for one in plan.passes:
        chosen = [many[at] for at in one]
        size = len(token_tree(chosen).token_ids) if plan.shared else len(one) * max(map(len, chosen))
        assert len(one) == 1 or size <= budget


@given(sequences, st.integers(1, 60), st.integers(0, 20))
def test_a_plan_of_trees_costs_less_than_the_plain_one(many: list[Int32Array], budget: int, overhead: int) -> None:
    plan = plan_passes(many, budget, share=True, overhead_tokens=overhead)
    plain = plan_passes(many, budget, share=False, overhead_tokens=overhead)
    if plan.shared:
        cost = sum(len(token_tree([many[at] for at in one]).token_ids) + overhead for one in plan.passes)
        rectangles = sum(len(one) * max(len(many[at]) for at in one) + overhead for one in plain.passes)
        assert cost <= (1 - LEAST_SAVED) * rectangles
    else:
        assert plan == plain


def test_a_group_with_one_prompt_is_one_tree_and_two_groups_are_two() -> None:
    many = [np.array([prompt] * 50 + [answer] * 5, np.int32) for answer in (1, 2, 3) for prompt in (7, 8)]
    plan = plan_passes(many, 70, share=True)
    assert plan.shared
    assert sorted(map(sorted, plan.passes)) == [[0, 2, 4], [1, 3, 5]]


def test_sequences_without_common_prefixes_stand_side_by_side() -> None:
    many = [np.array([first, *range(40)], np.int32) for first in range(6)]
    assert not plan_passes(many, 1000, share=True).shared
