"""Word problems of the math demo: right, fixed by their seed, and held out together with their twins."""

from __future__ import annotations

import itertools
import re

import pytest

from agentrl.types import Task
from agentrl_workflows.math_demo.problems import GAINS, LOSSES, is_held_out_sum, sum_problems


def read_terms(task: Task) -> list[int]:
    """Return the signed numbers as the text tells them."""
    start, *changes = re.findall(r"(\w+(?: away)?) (\d+)", task["question"])
    assert start[0] == "has"
    assert all(verb in (*GAINS, *LOSSES) for verb, _ in changes)
    return [int(start[1]), *(int(number) if verb in GAINS else -int(number) for verb, number in changes)]


def test_the_answer_is_the_sum_that_the_text_tells() -> None:
    for task in [*sum_problems(count=500, seed=0), *sum_problems(count=200, seed=1, split="held_out")]:
        terms = read_terms(task)
        assert task["terms"] == terms
        assert task["answer"] == str(sum(terms))
        assert all(partial >= 0 for partial in itertools.accumulate(terms))


def test_training_and_held_out_problems_share_no_sum_in_any_order() -> None:
    train = {tuple(sorted(task["terms"])) for task in sum_problems(count=8_000, seed=0)}
    held_out = {tuple(sorted(task["terms"])) for task in sum_problems(count=512, seed=7, split="held_out")}
    assert len(held_out) > 50
    assert not train & held_out
    assert all(is_held_out_sum(order) for terms in held_out for order in itertools.permutations(terms))


def test_problems_are_fixed_by_their_seed_and_different_within_a_set() -> None:
    tasks = sum_problems(count=1_000, seed=4)
    assert tasks == sum_problems(count=1_000, seed=4)
    assert tasks != sum_problems(count=1_000, seed=5)
    assert len({task["question"] for task in tasks}) == 1_000


def test_more_problems_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        sum_problems(count=20_000, seed=0, max_start=2, max_change=1)
