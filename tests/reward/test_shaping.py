"""Shaping terms have their documented values at the ends, and stay within their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl_rewards.shaping import (
    cosine_length_reward,
    has_one_box,
    has_sections,
    overlong_penalty,
    repetition_penalty,
)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_longer_response_is_never_penalized_less(first: int, second: int) -> None:
    short, long = sorted((first, second))
    assert -1 <= overlong_penalty(long, max_length=1000, buffer=100) <= overlong_penalty(short, max_length=1000, buffer=100)


@given(st.booleans(), st.integers(0, 10**9))
def test_a_cosine_reward_stays_between_its_two_values(correct: bool, length: int) -> None:
    value = cosine_length_reward(correct, length, max_length=100)
    assert (0.5 <= value <= 1.0) if correct else (-1.0 <= value <= -0.5)


def test_the_values_of_a_cosine_reward_are_reached_at_its_ends() -> None:
    ends = [cosine_length_reward(False, length, max_length=8, wrong=(-3, 0)) for length in (0, 8)]
    assert ends == pytest.approx([-3, 0])


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_repetition_is_a_share_of_the_n_grams(units: list[int], size: int) -> None:
    assert -1 < repetition_penalty(units, size=size) <= 0


def test_repetition_counts_n_grams_that_stood_before() -> None:
    assert repetition_penalty(["to", "be", "or", "not", "to", "be"], size=2) == pytest.approx(-0.2)
    assert repetition_penalty(["a"] * 101, size=1) == pytest.approx(-100 / 101)
    assert repetition_penalty([], size=1) == 0


@pytest.mark.parametrize(
    ("response", "sound"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>a</think>\n<answer>b</answer>\n", True),
        ("<think></think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> and more", False),
        ("<think>a</think>", False),
        ("<think>a<think></think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_sections_stand_once_in_order_and_alone(response: str, sound: bool) -> None:
    assert has_sections(response, "think", "answer") is sound


def test_a_box_that_is_not_closed_is_no_box() -> None:
    assert not has_one_box(r"\boxed{4")


def test_limits_that_make_no_sense_are_refused() -> None:
    for call in (
        lambda: overlong_penalty(1, max_length=10, buffer=0),
        lambda: overlong_penalty(1, max_length=10, buffer=11),
        lambda: cosine_length_reward(True, 1, max_length=0),
        lambda: repetition_penalty([1], size=0),
    ):
        with pytest.raises(ConfigError):
            call()
