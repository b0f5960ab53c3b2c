"""The decoupled PPO loss: goldens, a slow float64 reference, finite differences, limits, diagnostics, bad input."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.corrections import behavior_weights
from agentrl.algo.loss_batch import importance_ratio
from agentrl.algo.loss_metrics import combine
from agentrl.algo.losses import clipped_objective
from agentrl.algo.objective import LossOutput
from tests.algo.decoupled import PpoNumbers, decoupled_ppo_loss

Mode = Literal["clamp", "mask"]
MODES: list[Mode] = ["clamp", "mask"]


def settings(mode: Mode = "mask", cap: float = 2.0) -> AlgorithmConfig:
    return AlgorithmConfig(clip_low=0.2, clip_high=0.3, behavior_weight_cap=cap, behavior_weight_mode=mode)


CONFIG = settings()


def slow_loss(
    current: Tensor, proximal: Tensor, behavior: Tensor, advantages: Tensor, mask: Tensor, n: int, config: AlgorithmConfig
) -> float:
    total, numbers = 0.0, PpoNumbers.of(config)
    flat = (t.flatten().tolist() for t in (current, proximal, behavior, advantages, mask))
    for c, p, b, a, m in zip(*flat, strict=True):
        if not m:
            continue
        u, w = math.exp(c - p), math.exp(p - b)
        if w > numbers.cap:
            w = numbers.cap if numbers.mode == "clamp" else 0.0
        clipped = min(max(u, 1 - numbers.clip_low), 1 + numbers.clip_high)
        total += w * min(u * a, clipped * a)
    return -total / n


class Case:
    """Random tokens, some masked out; the ratios reach both sides of the clip and of the cap."""

    def __init__(self, seed: int, count: int = 64, dtype: torch.dtype = torch.float64) -> None:
        g = torch.Generator().manual_seed(seed)
        self.behavior = -torch.rand(count, generator=g, dtype=torch.float64) * 3 - 1
        self.proximal = self.behavior + torch.randn(count, generator=g, dtype=torch.float64) * 0.5
        self.current = self.proximal + torch.randn(count, generator=g, dtype=torch.float64) * 0.3
        self.advantages = torch.randn(count, generator=g, dtype=torch.float64)
        self.mask = torch.rand(count, generator=g) < 0.7
        self.mask[0] = True
        for name in ("behavior", "proximal", "current", "advantages"):
            setattr(self, name, getattr(self, name).to(dtype))
        self.n = int(self.mask.sum())

    def loss(self, config: AlgorithmConfig = CONFIG, current: Tensor | None = None, n: int | None = None) -> LossOutput:
        return decoupled_ppo_loss(
            self.current if current is None else current,
            self.proximal,
            self.behavior,
            self.advantages,
            self.mask,
            num_loss_tokens=n or self.n,
            config=config,
        )


def gradient(case: Case, config: AlgorithmConfig = CONFIG) -> Tensor:
    current = case.current.clone().requires_grad_()
    [result] = torch.autograd.grad(case.loss(config, current).loss, current)
    return result


seeds = st.integers(0, 10_000)


@given(seeds, st.sampled_from(MODES), st.integers(1, 500))
def test_it_equals_the_slow_reference(seed: int, mode: Mode, n: int) -> None:
    case = Case(seed)
    config = settings(mode)
    slow = slow_loss(case.current, case.proximal, case.behavior, case.advantages, case.mask, n, config)
    assert case.loss(config, n=n).loss.item() == pytest.approx(slow, rel=1e-12, abs=1e-15)


def test_a_loss_worked_out_by_hand() -> None:
    # u = 1.5 clipped to 1.3 (A > 0), u = 1.5 kept (A < 0), u = 0.5 clipped to 0.8 (A < 0), u = 1 with w over the cap.
    u, w = torch.tensor([1.5, 1.5, 0.5, 1.0]).double(), torch.tensor([1.0, 2.0, 0.5, 4.0]).double()
    advantages = torch.tensor([2.0, -1.0, -4.0, 1.0]).double()
    behavior = torch.full((4,), -3.0).double()
    proximal = behavior + w.log()
    mask = torch.ones(4, dtype=torch.bool)
    terms = {"mask": [2.6, 2.0 * -1.5, 0.5 * -3.2, 0.0], "clamp": [2.6, 2.0 * -1.5, 0.5 * -3.2, 2.0]}
    for mode in MODES:
        config = settings(mode, 2.0 + 1e-9)
        out = decoupled_ppo_loss(proximal + u.log(), proximal, behavior, advantages, mask, num_loss_tokens=4, config=config)
        assert out.loss.item() == pytest.approx(-sum(terms[mode]) / 4, abs=1e-8)


@given(seeds, st.sampled_from(MODES))
def test_the_gradient_agrees_with_finite_differences(seed: int, mode: Mode) -> None:
    case = Case(seed, count=16)
    config = settings(mode)
    analytic = gradient(case, config)
    u = (case.current - case.proximal).exp()
    step = 1e-6
    for i in range(16):
        if min(abs(u[i] - 1 + 0.2), abs(u[i] - 1 - 0.3)) < 1e-4:
            continue  # at the kink there is no derivative
        ahead, behind = case.current.clone(), case.current.clone()
        ahead[i] += step
        behind[i] -= step
        numeric = (case.loss(config, ahead).loss - case.loss(config, behind).loss) / (2 * step)
        assert analytic[i].item() == pytest.approx(numeric.item(), rel=1e-6, abs=1e-9)


def slow_ppo(current: Tensor, center: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Schulman et al., arXiv 1707.06347, equation 7, token mean; written without anything of agentrl."""
    ratio = torch.exp(current - center)
    surrogate = torch.min(ratio * advantages, torch.clamp(ratio, 1 - clip, 1 + clip) * advantages)
    return -surrogate[mask].mean()


@given(seeds, st.sampled_from(MODES))
def test_without_staleness_it_is_ppo_exactly(seed: int, mode: Mode) -> None:
    case = Case(seed)
    case.behavior = case.proximal.clone()
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.2, behavior_weight_cap=1.0, behavior_weight_mode=mode)
    current = case.current.clone().requires_grad_()
    ppo = slow_ppo(current, case.proximal, case.advantages, case.mask, 0.2)
    [expected] = torch.autograd.grad(ppo, current)
    torch.testing.assert_close(case.loss(config).loss, ppo.detach(), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(gradient(case, config), expected, rtol=1e-14, atol=1e-15)


@given(seeds)
def test_on_policy_the_gradient_is_reinforce_with_a_baseline(seed: int) -> None:
    """With u = w = 1 the derivative by a token's log-prob is -A / N, with no half lost where both branches of min tie."""
    case = Case(seed)
    case.behavior = case.proximal = case.current.clone()
    expected = torch.where(case.mask, -case.advantages / case.n, 0.0)
    torch.testing.assert_close(gradient(case), expected, rtol=1e-14, atol=0)


@given(seeds)
def test_the_behavior_weight_is_always_applied_and_carries_no_gradient(seed: int) -> None:
    case = Case(seed)
    case.current = case.proximal.clone()
    w = (case.proximal - case.behavior).exp()
    capped = torch.where(w > 2.0, 0.0, w)
    expected = torch.where(case.mask, -capped * case.advantages / case.n, 0.0)
    torch.testing.assert_close(gradient(case), expected, rtol=1e-13, atol=0)
    case.proximal.requires_grad_()
    case.behavior.requires_grad_()
    case.advantages.requires_grad_()
    current = case.current.clone().requires_grad_()
    case.loss(current=current).loss.backward()
    assert current.grad is not None
    assert case.proximal.grad is case.behavior.grad is case.advantages.grad is None


def test_the_cap_is_reached_but_not_passed() -> None:
    proximal = torch.tensor([1.9, 2.0, 2.1]).double().log()
    behavior = torch.zeros(3).double()
    clamped = behavior_weights(proximal, behavior, 2.0 + 1e-12, "clamp")
    masked = behavior_weights(proximal, behavior, 2.0 + 1e-12, "mask")
    torch.testing.assert_close(clamped.capped, torch.tensor([1.9, 2.0, 2.0]).double())
    torch.testing.assert_close(masked.capped, torch.tensor([1.9, 2.0, 0.0]).double())
    assert clamped.over.tolist() == masked.over.tolist() == [False, False, True]
    torch.testing.assert_close(clamped.raw, torch.tensor([1.9, 2.0, 2.1]).double())


def test_the_terms_stand_alone() -> None:
    torch.testing.assert_close(importance_ratio(torch.tensor([-1.0]), torch.tensor([-2.0])), torch.tensor([math.e]))
    u, a = torch.tensor([0.5, 1.0, 1.5] * 2), torch.tensor([1.0] * 3 + [-1.0] * 3)
    expected = torch.tensor([0.5, 1.0, 1.3, -0.8, -1.0, -1.5])
    torch.testing.assert_close(clipped_objective(u, a, 0.2, 0.3), expected)


@given(seeds, st.integers(1, 63), st.permutations(range(64)))
def test_cutting_and_reordering_a_batch_changes_nothing(seed: int, at: int, order: list[int]) -> None:
    whole, parts = Case(seed), Case(seed)
    moved = torch.tensor(order)
    for name in ("behavior", "proximal", "current", "advantages", "mask"):
        setattr(parts, name, getattr(parts, name)[moved])
    outputs = [
        decoupled_ppo_loss(
            parts.current[piece],
            parts.proximal[piece],
            parts.behavior[piece],
            parts.advantages[piece],
            parts.mask[piece],
            num_loss_tokens=whole.n,
            config=CONFIG,
        )
        for piece in (slice(0, at), slice(at, 64))
    ]
    expected = whole.loss()
    assert sum(o.loss.item() for o in outputs) == pytest.approx(expected.loss.item(), rel=1e-12, abs=1e-15)
    together = combine([o.metrics for o in outputs])
    assert together == pytest.approx(combine([expected.metrics]), rel=1e-12, abs=1e-15)
    torch.testing.assert_close(gradient(parts), gradient(whole)[moved], rtol=1e-14, atol=0)


@given(seeds)
def test_the_shape_does_not_matter(seed: int) -> None:
    flat = Case(seed)
    square = Case(seed)
    for name in ("behavior", "proximal", "current", "advantages", "mask"):
        setattr(square, name, getattr(square, name).view(4, 16))
    assert square.loss().loss.item() == pytest.approx(flat.loss().loss.item(), rel=1e-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_outside_the_mask_never_matter(bad: float) -> None:
    clean, dirty = Case(0), Case(0)
    for name in ("behavior", "proximal", "current", "advantages"):
        getattr(dirty, name)[~dirty.mask] = bad
    assert dirty.loss().loss.item() == clean.loss().loss.item()
    assert gradient(dirty).tolist() == gradient(clean).tolist()
    assert combine([dirty.loss().metrics]) == combine([clean.loss().metrics])


@given(
    st.lists(
        st.tuples(st.floats(-1e4, 0), st.floats(-1e4, 0), st.floats(-1e4, 0), st.sampled_from([-1e6, -1.0, 0.0, 1.0, 1e6])),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(MODES),
)
def test_no_finite_log_probs_give_nan_or_infinity(rows: list[tuple[float, float, float, float]], mode: Mode) -> None:
    current, proximal, behavior, advantages = torch.tensor(rows, dtype=torch.float32).T
    current = current.clone().requires_grad_()
    config = settings(mode)
    mask = torch.ones(len(rows), dtype=torch.bool)
    out = decoupled_ppo_loss(current, proximal, behavior, advantages, mask, num_loss_tokens=len(rows), config=config)
    out.loss.backward()
    assert out.loss.isfinite()
    assert current.grad is not None
    assert current.grad.isfinite().all()
    assert all(math.isfinite(value) for value in combine([out.metrics]).values())


def test_a_nan_inside_the_mask_is_not_hidden() -> None:
    case = Case(0)
    case.current[0] = math.nan
    assert case.loss().loss.isnan()


def test_half_precision_log_probs_are_widened_before_any_arithmetic() -> None:
    narrow = Case(3, dtype=torch.bfloat16)
    wide = Case(3, dtype=torch.bfloat16)
    for name in ("behavior", "proximal", "current", "advantages"):
        setattr(wide, name, getattr(wide, name).float())
    assert narrow.loss().loss.dtype == torch.float32
    assert narrow.loss().loss.item() == wide.loss().loss.item()


@given(seeds)
def test_diagnostics_equal_their_definitions(seed: int) -> None:
    case = Case(seed)
    kept = case.mask
    fresh, interrupted = torch.arange(64) % 3 == 0, torch.arange(64) % 2 == 0
    out = decoupled_ppo_loss(
        case.current,
        case.proximal,
        case.behavior,
        case.advantages,
        kept,
        num_loss_tokens=case.n,
        config=CONFIG,
        fresh=fresh,
        interrupted=interrupted,
    )
    log_w = (case.proximal - case.behavior)[kept]
    w, u, a = log_w.exp(), (case.current - case.proximal).exp()[kept], case.advantages[kept]
    moved, behavior = (case.current - case.behavior)[kept], case.behavior[kept]
    young, cut = log_w[fresh[kept]].abs(), log_w[(fresh & interrupted)[kept]].abs()

    def share(of: Tensor, among: Tensor) -> float:
        return float((of & among).sum() / among.sum()) if among.any() else 0.0

    expected = {
        "num_loss_tokens": float(case.n),
        "loss": out.loss.item(),
        "kl_behavior_proximal_k1": float(-log_w.mean()),
        "kl_behavior_proximal_k3": float((w - 1 - log_w).mean()),
        "effective_sample_size": float(w.sum() ** 2 / (len(w) * (w**2).sum())),
        "behavior_weight_mean": float(w.mean()),
        "behavior_weight_max": float(w.max()),
        "ratio_max": float(u.max()),
        "behavior_log_weight_mean": float(log_w.abs().mean()),
        "behavior_log_weight_max": float(log_w.abs().max()),
        "num_fresh_tokens": float(len(young)),
        "mean_logprob_difference": float(young.mean()),
        "max_logprob_difference": float(young.max()),
        "num_interrupted_tokens": float(interrupted[kept].sum()),
        "num_interrupted_fresh_tokens": float(len(cut)),
        "mean_interrupted_difference": float(cut.mean()),
        "max_interrupted_difference": float(cut.max()),
        "clip_fraction_positive": share(u > 1.3, a > 0),
        "clip_fraction_negative": share(u < 0.8, a < 0),
        "cap_fraction_positive": share(w > 2.0, a > 0),
        "cap_fraction_negative": share(w > 2.0, a < 0),
        "log_ratio_positive": float(moved[a > 0].mean()) if (a > 0).any() else 0.0,
        "fallen_fraction_negative": share(behavior.exp() - (behavior + moved).exp() > 0.2, a < 0),
        "entropy": float((w * -case.proximal[kept]).sum() / w.sum()),
        "sample_ess_ratio": float((u * w).sum() ** 2 / (len(w) * ((u * w) ** 2).sum())),  # each token is a sample
        "by_slot.mask.kept": float((w <= 2.0).double().mean()),
    }
    assert combine([out.metrics]) == pytest.approx(expected, rel=1e-6)
    assert expected["kl_behavior_proximal_k3"] >= 0


def test_the_entropy_is_that_of_the_proximal_policy_whichever_policy_sampled() -> None:
    behavior, proximal = (torch.tensor(values, dtype=torch.float64) for values in ((0.5, 0.25, 0.25), (0.1, 0.2, 0.7)))
    sampled = torch.tensor([0, 0, 1, 2])  # each token as often as the behavior policy samples it
    out = decoupled_ppo_loss(
        proximal.log()[sampled],
        proximal.log()[sampled],
        behavior.log()[sampled],
        torch.ones(4).double(),
        torch.ones(4, dtype=torch.bool),
        num_loss_tokens=4,
        config=CONFIG,
    )
    assert combine([out.metrics])["entropy"] == pytest.approx(float(-(proximal * proximal.log()).sum()), rel=1e-9)


def test_clip_fractions_count_exactly_the_tokens_without_gradient() -> None:
    case = Case(1, count=512)
    config = settings(cap=1e9)
    dead = case.mask & (gradient(case, config) == 0)
    metrics = combine([case.loss(config).metrics])
    assert 0 < metrics["clip_fraction_positive"] < 1
    for sign, side in (("positive", case.advantages > 0), ("negative", case.advantages < 0)):
        assert metrics[f"clip_fraction_{sign}"] == pytest.approx(float((dead & side).sum() / (case.mask & side).sum()))


def test_the_kl_estimators_are_unbiased() -> None:
    """Expectation over the behavior policy by enumeration: both equal KL(behavior || proximal)."""
    behavior = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
    proximal = torch.tensor([0.3, 0.3, 0.3, 0.1], dtype=torch.float64).log()
    exact = float((behavior.exp() * (behavior - proximal)).sum())
    one = torch.ones(1, dtype=torch.bool)
    k1 = k3 = 0.0
    for token in range(4):
        p, b = proximal[token : token + 1], behavior[token : token + 1]
        metrics = combine([decoupled_ppo_loss(p, p, b, p * 0, one, num_loss_tokens=1, config=CONFIG).metrics])
        k1 += float(b.exp()) * metrics["kl_behavior_proximal_k1"]
        k3 += float(b.exp()) * metrics["kl_behavior_proximal_k3"]
    assert k1 == pytest.approx(exact, abs=1e-14)
    assert k3 == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize("count", [0, 5])
def test_a_microbatch_without_loss_tokens_adds_nothing(count: int) -> None:
    case = Case(0, count=max(count, 1))
    for name in ("behavior", "proximal", "current", "advantages", "mask"):
        setattr(case, name, getattr(case, name)[:count])
    case.mask = torch.zeros(count, dtype=torch.bool)
    empty = case.loss(n=10)
    assert empty.loss.item() == 0.0
    full = Case(1).loss()
    assert combine([full.metrics, empty.metrics]) == combine([full.metrics])
    assert set(combine([empty.metrics]).values()) == {0.0}


def test_without_fresh_tokens_there_is_no_log_prob_difference_rather_than_a_perfect_one() -> None:
    metrics = combine([Case(0).loss().metrics])
    assert metrics["num_fresh_tokens"] == 0
    assert "max_logprob_difference" not in metrics
    assert "mean_logprob_difference" not in metrics


def test_interrupted_tokens_of_an_earlier_version_are_counted_and_not_compared() -> None:
    case = Case(0)
    out = decoupled_ppo_loss(
        case.current,
        case.proximal,
        case.behavior,
        case.advantages,
        case.mask,
        num_loss_tokens=case.n,
        config=CONFIG,
        fresh=torch.zeros(64, dtype=torch.bool),
        interrupted=torch.ones(64, dtype=torch.bool),
    )
    metrics = combine([out.metrics])
    assert (metrics["num_interrupted_tokens"], metrics["num_interrupted_fresh_tokens"]) == (float(case.mask.sum()), 0.0)
    assert "max_interrupted_difference" not in metrics
    assert "mean_interrupted_difference" not in metrics


def test_no_metrics_combine_to_nothing() -> None:
    assert combine([]) == {}
