"""Figures by age and by turn: goldens worked out by hand, and sums that add up however a batch is cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.loss_metrics import AGES, TURNS, bucket_labels, combine
from agentrl.algo.objective import LossOutput
from tests.algo.decoupled import decoupled_ppo_loss

CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.3, behavior_weight_cap=2.0, behavior_weight_mode="mask")


def test_a_bucket_is_named_after_its_first_and_last_number() -> None:
    assert bucket_labels((0, 1, 2, 4)) == ("0", "1", "2_to_3", "4_up")
    assert (AGES[-2:], TURNS[-3:]) == (("4_to_7", "8_up"), ("4_to_7", "8_to_15", "16_up"))


def loss_of(w: list[float], u: list[float], advantages: list[float], mask: list[bool], **more: torch.Tensor) -> LossOutput:
    behavior = torch.full((len(w),), -1.0).double()
    proximal = behavior + torch.tensor(w).double().log()
    current = proximal + torch.tensor(u).double().log()
    given_mask = torch.tensor(mask)
    return decoupled_ppo_loss(
        current,
        proximal,
        behavior,
        torch.tensor(advantages).double(),
        given_mask,
        num_loss_tokens=int(given_mask.sum()),
        config=CONFIG,
        **more,
    )


def test_figures_by_age_worked_out_by_hand() -> None:
    out = loss_of(
        w=[1.0, 1.0, 1.0, 3.0, 0.5, 4.0, 9.0],
        u=[1.0, 1.5, 1.0, 1.0, 0.5, 1.0, 1.0],
        advantages=[1.0, 1.0, 0.0, 1.0, -1.0, -1.0, 1.0],
        mask=[True] * 6 + [False],
        ages=torch.tensor([0, 0, 0, 1, 1, 11, 2], dtype=torch.int32),
    )
    found = {name: value for name, value in combine([out.metrics]).items() if "_by_age" in name}
    assert found == pytest.approx(
        {
            "loss_tokens_by_age.0": 3,
            "effective_sample_size_by_age.0": 1.0,
            "behavior_log_weight_mean_by_age.0": 0.0,
            "clip_fraction_by_age.0": 1 / 2,  # u = 1.5 of the two tokens with an advantage
            "cap_fraction_by_age.0": 0.0,
            "loss_tokens_by_age.1": 2,
            "effective_sample_size_by_age.1": 3.5**2 / (2 * (9 + 0.25)),
            "behavior_log_weight_mean_by_age.1": (math.log(3) + math.log(2)) / 2,
            "clip_fraction_by_age.1": 1 / 2,  # u = 0.5 with a negative advantage
            "cap_fraction_by_age.1": 1 / 2,  # w = 3
            "fallen_fraction_by_age.1": 1.0,  # from e^-1 = 0.37 to a quarter of it
            "loss_tokens_by_age.8_up": 1,
            "effective_sample_size_by_age.8_up": 1.0,
            "behavior_log_weight_mean_by_age.8_up": math.log(4),
            "clip_fraction_by_age.8_up": 0.0,
            "cap_fraction_by_age.8_up": 1.0,
            "fallen_fraction_by_age.8_up": 0.0,
        }
    )


def test_the_movement_of_praised_and_of_blamed_tokens_worked_out_by_hand() -> None:
    out = loss_of(
        w=[1.0, 0.5, 1.0, 0.5, 1.0, 9.0],
        u=[1.0, 0.5, 0.1, 0.9, 2.0, 9.0],
        advantages=[1.0, 1.0, -1.0, -1.0, 0.0, 1.0],
        mask=[True] * 5 + [False],
    )
    found = combine([out.metrics])
    assert found["log_ratio_positive"] == pytest.approx(math.log(0.25) / 2)
    assert found["fallen_fraction_negative"] == 1.0  # e^-1 falls to a tenth of it, and to 0.45 of it by 0.202


def test_entropy_by_turn_worked_out_by_hand() -> None:
    out = loss_of(
        w=[1.0, 3.0, 2.0, 9.0],
        u=[1.0] * 4,
        advantages=[1.0] * 4,
        mask=[True, True, True, False],
        turns=torch.tensor([0, 0, 20, 1], dtype=torch.int32),
    )
    found = {name: value for name, value in combine([out.metrics]).items() if "_by_turn" in name}
    assert found == pytest.approx(
        {"entropy_by_turn.0": (1 * 1 + 3 * (1 - math.log(3))) / 4, "entropy_by_turn.16_up": 1 - math.log(2)}
    )


def test_tokens_of_unknown_age_and_turn_have_no_figures_by_them() -> None:
    assert not [name for name in combine([loss_of([1.0], [1.0], [1.0], [True]).metrics]) if "_by_" in name]


@given(st.integers(0, 10_000), st.lists(st.integers(0, 48), max_size=4), st.permutations(range(48)))
def test_the_figures_do_not_depend_on_how_a_batch_is_cut_and_ordered(seed: int, cuts: list[int], order: list[int]) -> None:
    g = torch.Generator().manual_seed(seed)
    columns = {
        "behavior_logprobs": -torch.rand(48, generator=g).double() * 3 - 1,
        "advantages": torch.randn(48, generator=g).double(),
        "loss_mask": torch.rand(48, generator=g) < 0.7,
        "ages": torch.randint(0, 12, (48,), generator=g),
        "turns": torch.randint(0, 20, (48,), generator=g),
    }
    columns["proximal_logprobs"] = columns["behavior_logprobs"] + torch.randn(48, generator=g).double() * 0.5
    columns["current_logprobs"] = columns["proximal_logprobs"] + torch.randn(48, generator=g).double() * 0.3
    whole = decoupled_ppo_loss(**columns, num_loss_tokens=48, config=CONFIG)
    bounds = [0, *sorted(cuts), 48]
    parts = [
        decoupled_ppo_loss(
            **{name: values[order][begin:end] for name, values in columns.items()}, num_loss_tokens=48, config=CONFIG
        )
        for begin, end in itertools.pairwise(bounds)
    ]
    figures = combine([whole.metrics])
    assert combine([part.metrics for part in parts]) == pytest.approx(figures, rel=1e-12, abs=1e-15)
    assert sum(figures.get(f"loss_tokens_by_age.{age}", 0.0) for age in AGES) == int(columns["loss_mask"].sum())
