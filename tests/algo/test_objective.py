"""What a loss is made of: aggregates, terms and their schedules, two corrections at once, and metrics of several parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.loss_batch import LossBatch, LossTotals, Metric, TokenLoss, Weights
from agentrl.algo.loss_metrics import MAXIMA, SUMS, LossMetrics, combine
from agentrl.algo.losses import (
    LOWEST_LOG_WEIGHT,
    AnchoredOptions,
    CispoOptions,
    DppoTvOptions,
    DualClipOptions,
    GspoOptions,
    KimiOptions,
    M2poOptions,
    PpoOptions,
    VespoOptions,
    anchored,
    cispo,
    dppo_tv,
    dual_clip,
    gspo,
    kimi,
    m2po,
    ppo,
    vespo,
)
from agentrl.algo.objective import Objective

TURNS, SAMPLES = [0, 0, 0, 1, 2], [0, 0, 0, 0, 1]
"""Three turns of 3, 1 and 1 tokens; the first two are of one sample."""


def tokens(
    advantages: list[float],
    *,
    current: list[float] | None = None,
    proximal: list[float] | None = None,
    behavior: list[float] | None = None,
    turn: list[int] | None = None,
    sample: list[int] | None = None,
) -> LossBatch:
    """Return tokens whose log-probs are -1 unless they are given, of one turn unless that is given."""
    count = len(advantages)
    minus_one, zeros = [-1.0] * count, [0] * count
    turn, sample = turn or zeros, sample or zeros

    def numbers(values: list[float] | None) -> Tensor:
        return torch.tensor(values or minus_one, dtype=torch.float64)

    none = torch.zeros(count, dtype=torch.int64)
    return LossBatch(
        current_logprobs=numbers(current).requires_grad_(),
        proximal_logprobs=numbers(proximal),
        behavior_logprobs=numbers(behavior),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        ages=none,
        turn=torch.tensor(turn),
        sample=torch.tensor(sample),
        group=none,
        role=none,
        player=none,
        rewards=torch.zeros(count),
        totals=LossTotals(tokens=count, turns=len(set(turn)), samples=len(set(sample))),
    )


def loss_of(batch: LossBatch, *, step: int = 0, **fields: object) -> float:
    given = {"policy_loss": "reinforce", "correction": "none", **fields}
    return float(Objective(AlgorithmConfig.model_validate(given))(batch, step=step).loss.detach())


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token", (1 + 2 + 3 + 4 + 5) / 5),
        ("turn", ((1 + 2 + 3) / 3 + 4 + 5) / 3),
        ("sequence", ((1 + 2 + 3 + 4) / 4 + 5) / 2),
        ({"fixed": 10}, (1 + 2 + 3 + 4 + 5) / 20),
    ],
)
def test_an_aggregate_divides_loss_and_terms_by_what_its_name_says(aggregate: object, expected: float) -> None:
    loss = tokens([1.0, 2.0, 3.0, 4.0, 5.0], turn=TURNS, sample=SAMPLES)
    assert loss_of(loss, aggregate=aggregate) == pytest.approx(expected)  # of -A log pi, log pi = -1
    roots = [-1 + math.sqrt(each) for each in (1.0, 2.0, 3.0, 4.0, 5.0)]
    term = tokens([0.0] * 5, current=roots, turn=TURNS, sample=SAMPLES)
    assert loss_of(term, aggregate=aggregate, terms=[{"log_ratio": 1.0}]) == pytest.approx(expected)


def test_the_weight_of_a_term_moves_in_a_line_with_the_batches() -> None:
    batch = tokens([0.0], current=[0.0])
    terms = [{"log_ratio": {"weight": 1.0, "final_weight": 0.2, "over_steps": 4}}]
    assert [loss_of(batch, step=step, terms=terms) for step in (0, 1, 4, 9)] == pytest.approx([1.0, 0.8, 0.2, 0.2])


def test_the_weights_of_two_corrections_multiply_and_a_token_that_one_drops_is_dropped() -> None:
    batch = tokens([1.0, 1.0], behavior=[-1 - math.log(2), -1 - math.log(8)], turn=[0, 1], sample=[0, 1])
    both = {"proximal": "forward", "token": {"clamp": {"cap": 4}}, "sequence": {"sequence_truncate": {"cap": 3}}}
    assert loss_of(batch, correction=both) == pytest.approx((2 * 2 + 4 * 3) / 2)
    swapped = {"proximal": "forward", "token": {"mask": {"cap": 4}}, "sequence": {"sequence_truncate": {"cap": 3}}}
    assert loss_of(batch, correction=swapped) == pytest.approx(2 * 2 / 2)


@pytest.mark.parametrize(("token", "sequence", "share"), [(4, 100, 0.5), (100, 4, 0.5), (100, 100, 0.0), (1.5, 4, 1.0)])
def test_a_token_that_either_correction_limits_counts_as_capped(token: float, sequence: float, share: float) -> None:
    batch = tokens([1.0, 1.0], behavior=[-1 - math.log(2), -1 - math.log(8)], turn=[0, 1], sample=[0, 1])
    correction = {"proximal": "forward", "token": {"clamp": {"cap": token}}, "sequence": {"sequence_truncate": sequence}}
    algorithm = AlgorithmConfig.model_validate({"policy_loss": "reinforce", "correction": correction})
    assert combine([Objective(algorithm)(batch).metrics])["cap_fraction_positive"] == share


def test_effective_samples_are_those_of_the_policy_of_now_whatever_the_centre_is() -> None:
    given = {"behavior": [-1 - math.log(2), -1.0, -1 + math.log(3)], "proximal": [-3.0, -2.0, -1.0]}
    batch = tokens([1.0] * 3, sample=[0, 1, 1], turn=[0, 1, 1], **given)  # weights of 2 and 1/3
    for proximal in ("forward", "behavior", "versions"):
        correction = {"proximal": proximal, "token": "none"}
        algorithm = AlgorithmConfig.model_validate({"policy_loss": "reinforce", "correction": correction})
        found = combine([Objective(algorithm)(batch).metrics])["sample_ess_ratio"]
        assert found == pytest.approx((2 + 1 / 3) ** 2 / (2 * (4 + 1 / 9)))


def first_alone(batch: LossBatch) -> Weights:
    """Weigh all tokens by 2, and keep the first."""
    return Weights(weight=torch.full_like(batch.advantages, 2.0), keep=torch.arange(len(batch.advantages)) == 0)


def test_a_token_that_a_correction_does_not_keep_is_out_whatever_its_weight() -> None:
    assert loss_of(tokens([1.0, 1.0, 1.0]), correction=f"{__name__}:first_alone") == pytest.approx(2 / 3)


def test_a_maximum_of_several_parts_is_the_largest_and_a_mean_adds_up() -> None:
    def part(peak: float, total: float, count: float) -> LossMetrics:
        zeros = torch.zeros((), dtype=torch.float64)
        own = {
            "mine.peak": Metric("maximum", zeros + peak, zeros),
            "mine.average": Metric("mean", zeros + total, zeros + count),
        }
        sums, maxima = (torch.zeros(len(names), dtype=torch.float64) for names in (SUMS, MAXIMA))
        return LossMetrics(sums=sums, maxima=maxima, own=own)

    found = combine([part(3.0, 6.0, 2.0), part(5.0, 0.0, 1.0)])
    assert (found["by_slot.mine.peak"], found["by_slot.mine.average"]) == (5.0, 2.0)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (ppo, PpoOptions(clip_low=0.1, clip_high=0.3)),
        (gspo, GspoOptions(clip_low=0.1, clip_high=0.3)),
        (dual_clip, DualClipOptions(clip_low=0.1, clip_high=0.3)),
    ],
)
def test_tokens_count_as_clipped_where_the_loss_stops_their_gradient(
    loss: Callable[[LossBatch, object], TokenLoss], options: object
) -> None:
    ratios, signs = [1.2, 1.4, 0.95, 0.8] * 2, [1.0] * 4 + [-1.0] * 4
    batch = tokens(signs, current=[-1 + math.log(ratio) for ratio in ratios], turn=list(range(8)), sample=list(range(8)))
    found = loss(batch, options)
    found.loss.sum().backward()
    assert batch.current_logprobs.grad is not None
    assert found.clipped is not None
    assert found.clipped.tolist() == [False, True, False, False, False, False, False, True]
    assert found.clipped.tolist() == (batch.current_logprobs.grad == 0).tolist()


def test_dual_clip_bounds_the_loss_of_negative_advantages_alone() -> None:
    far = tokens([-1.0, 1.0, -1.0], current=[1.0, 1.0, 0.0])  # ratios of e^2 and e
    found = dual_clip(far, DualClipOptions(floor=3.0))
    assert found.loss.tolist() == pytest.approx([3.0, -1.2, math.e])
    assert found.clipped is not None
    assert found.clipped.tolist() == [True, True, False]


def test_the_budget_of_m2po_is_that_of_tokens_which_moved_where_the_advantage_pushes() -> None:
    batch = tokens([1.0, 1.0, 1.0, 0.0], current=[-0.5, -1.3, -1.0, -0.2])  # up, down, not at all, and for nothing
    found = m2po(batch, M2poOptions(budget=0.04, least_low=0.01, least_high=0.01))
    assert found.loss.tolist() == pytest.approx([-math.exp(0.2), -math.exp(-0.3), -1.0, 0.0])
    harmful = found.metrics["harmful"]
    assert float(harmful.value / harmful.count) == 0.25


def test_the_bound_of_m2po_leaves_what_smaller_moves_do_not_spend_to_the_larger_ones() -> None:
    batch = tokens([1.0, 1.0], current=[-1 + math.sqrt(0.03), -0.5])
    found = m2po(batch, M2poOptions(budget=0.04, least_low=0.01, least_high=0.01))
    assert found.loss.tolist() == pytest.approx([-math.exp(math.sqrt(0.03)), -math.exp(math.sqrt(2 * 0.04 - 0.03))])


def test_dppo_bounds_a_fall_and_a_rise_by_numbers_of_their_own() -> None:
    def moved(by: float, advantage: float) -> list[bool]:
        batch = tokens([advantage], current=[math.log(0.5 + by)], behavior=[math.log(0.5)])
        clipped = dppo_tv(batch, DppoTvOptions(low=0.1, high=0.3)).clipped
        assert clipped is not None
        return clipped.tolist()

    assert [moved(by, -1.0) for by in (-0.05, -0.2)] == [[False], [True]]
    assert [moved(by, 1.0) for by in (0.2, 0.4)] == [[False], [True]]


def test_dppo_bounds_the_weight_of_a_token_that_stays() -> None:
    rare = tokens([1.0, -1.0], current=[math.log(0.02)] * 2, behavior=[math.log(0.002)] * 2)
    found = dppo_tv(rare, DppoTvOptions(low=0.1, high=0.1, cap=4.0))
    assert found.loss.tolist() == pytest.approx([-4 * math.log(0.02), 4 * math.log(0.02)])


def test_anchored_turns_a_token_that_fell_too_far_and_leaves_one_that_rises_to_ppo() -> None:
    def gradients(options: AnchoredOptions, ages: Sequence[int] = (0, 0, 0, 0)) -> list[float]:
        falls = [0.0, 0.1, 0.2, 0.5]
        current = [math.log(0.9 - fall) for fall in falls]
        batch = tokens([-1.0] * 4, current=current, proximal=current, behavior=[math.log(0.9)] * 4)
        anchored(replace(batch, ages=torch.tensor(ages)), options).loss.sum().backward()
        assert batch.current_logprobs.grad is not None
        return batch.current_logprobs.grad.tolist()

    assert gradients(AnchoredOptions()) == pytest.approx([1.0, 0.5, 0.0, -1.0], abs=1e-6)
    assert gradients(AnchoredOptions(plateau=True)) == pytest.approx([1.0, 1.0, 0.0, -1.0], abs=1e-6)
    by_age = AnchoredOptions(low_per_version=0.1)
    assert gradients(by_age, ages=(0, 0, 1, 9)) == pytest.approx([1.0, 0.0, 0.0, -1.0], abs=1e-6)
    rising = tokens([1.0], current=[-0.5])
    assert anchored(rising, AnchoredOptions()).loss.tolist() == ppo(rising, PpoOptions()).loss.tolist()


def test_cispo_cuts_the_ratio_from_above_and_keeps_the_gradient() -> None:
    batch = tokens([1.0, -1.0, 1.0], current=[-0.5, -0.5, -1.1])  # ratios of e^0.5, e^0.5 and e^-0.1
    found = cispo(batch, CispoOptions(clip_high=0.25))
    found.loss.sum().backward()
    assert batch.current_logprobs.grad is not None
    assert batch.current_logprobs.grad.tolist() == pytest.approx([-1.25, 1.25, -math.exp(-0.1)])
    cut = found.metrics["cut"]
    assert float(cut.value / cut.count) == pytest.approx(2 / 3)


def test_kimi_pays_half_of_tau_for_the_squared_log_ratio_to_the_policy_that_sampled() -> None:
    batch = tokens([1.0, 0.0], current=[-1.5, -1.0], proximal=[-7.0, -7.0], behavior=[-1.0, -4.0])
    found = kimi(batch, KimiOptions(tau=0.4))
    assert found.loss.tolist() == pytest.approx([1.5 + 0.2 * 0.25, 0.2 * 9])
    square = found.metrics["square"]
    assert float(square.value / square.count) == pytest.approx((0.25 + 9) / 2)


def test_the_weight_of_a_segment_in_vespo_is_bounded() -> None:
    batch = tokens([1.0] * 8, current=[-6.0] * 8)  # 8 tokens of log weight -5
    phi = float(vespo(batch, VespoOptions(power_positive=1.0, decay_positive=1.0)).loss[0].detach()) / 6
    assert math.log(phi) == pytest.approx(1 + LOWEST_LOG_WEIGHT, rel=1e-5)
