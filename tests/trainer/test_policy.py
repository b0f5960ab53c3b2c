"""One training step, against slow references."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.packing import split_minibatches
from agentrl.errors import InvariantError, StaleDataError, TrainError
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.types import Sample
from tests.trainer.helpers import full_logprobs, load_plain, random_batch, slow_loss

_CLAMP = AlgorithmConfig(behavior_weight_mode="clamp", behavior_weight_cap=2.0)


def _trainer(path: Path, algorithm: AlgorithmConfig | None = None, seed: int = 0, **settings: object) -> PolicyTrainer:
    config = TrainerConfig.model_validate({"lr": 1e-3, "minibatches": 1, **settings})
    model = PolicyModel(path, device=torch.device("cpu"))
    return PolicyTrainer(model, config, algorithm or AlgorithmConfig(), total_steps=10, seed=seed)


def _weights(trainer: PolicyTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters.values()])


def _with_advantages(batch: TrainBatch, index: int, value: float) -> TrainBatch:
    item = batch.samples[index]
    changed = TrainSample(sample=item.sample, advantages=np.where(item.sample.loss_mask, value, 0).astype(np.float32))
    return replace(batch, samples=(*batch.samples[:index], changed, *batch.samples[index + 1 :]))


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), _CLAMP])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_is_the_printed_formula_in_double_precision(
    checkpoint: Path, algorithm: AlgorithmConfig, temperature: float
) -> None:
    batch = random_batch(samples=8, temperature=temperature)
    slow = slow_loss(load_plain(checkpoint, torch.float64), batch, algorithm)

    report = _trainer(checkpoint, algorithm).step(batch)

    assert report.skipped is None
    assert report.metrics["loss"] == pytest.approx(slow, rel=1e-5)


def test_a_step_is_the_one_a_hand_written_full_batch_step_takes(checkpoint: Path) -> None:
    batch = random_batch()
    trainer = _trainer(checkpoint, _CLAMP, weight_decay=0.1, max_grad_norm=0.5)
    report = trainer.step(batch)

    plain = load_plain(checkpoint)
    losses: list[torch.Tensor] = []
    for item in batch.samples:
        mask = torch.from_numpy(item.sample.loss_mask[1:])
        current = full_logprobs(plain, item.sample)[mask]
        behavior = torch.from_numpy(item.sample.behavior_logprobs[1:])[mask]
        w = (current.detach() - behavior).exp().clamp(max=2.0)
        u = (current - current.detach()).exp()
        losses.append(-(w * u * torch.from_numpy(item.advantages[1:])[mask]))
    torch.cat(losses).mean().backward()
    named = dict(plain.named_parameters())
    norm = torch.nn.utils.clip_grad_norm_(named.values(), 0.5)
    groups = [
        {"params": [p for p in named.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)).step()

    assert report.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    for name, parameter in trainer.model.parameters.items():
        torch.testing.assert_close(parameter, named[name], rtol=0, atol=1e-5)


@settings(max_examples=8, deadline=None)
@given(microbatch_tokens=st.integers(1, 500), order=st.permutations(range(6)))
def test_neither_the_token_budget_nor_the_order_of_samples_changes_the_gradient(
    checkpoint: Path, microbatch_tokens: int, order: list[int]
) -> None:
    batch = random_batch()
    shuffled = replace(batch, samples=tuple(batch.samples[i] for i in order))

    one = _trainer(checkpoint).step(batch).metrics
    many = _trainer(checkpoint, microbatch_tokens=microbatch_tokens).step(shuffled).metrics

    for name in ("loss", "grad_norm", "kl_behavior_proximal_k3", "effective_sample_size", "behavior_log_weight_max"):
        assert many[name] == pytest.approx(one[name], rel=2e-4, abs=1e-6), name


def test_each_minibatch_is_one_optimizer_step_on_its_own_tokens_around_one_proximal_policy(checkpoint: Path) -> None:
    batch = random_batch(samples=8)
    start = load_plain(checkpoint, torch.float64)

    trainer = _trainer(checkpoint, minibatches=4, lr=1e-2)
    report = trainer.step(batch)

    assert report.metrics["optimizer_steps"] == 4
    assert trainer.state.optimizer_steps == 4
    assert report.metrics["num_loss_tokens"] == report.metrics["loss_tokens"]
    # Every token's proximal log-prob is that of the weights before the first step, although three steps came between.
    differences = [
        np.abs(full_logprobs(start, item.sample).detach().numpy() - item.sample.behavior_logprobs[1:])[
            item.sample.loss_mask[1:]
        ]
        for item in batch.samples
    ]
    assert report.metrics["behavior_log_weight_max"] == pytest.approx(float(np.concatenate(differences).max()), rel=1e-5)
    assert report.metrics["ratio_max"] > 1.01
    assert sorted(report.proximal_logprobs) == list(range(8))
    for at, item in enumerate(batch.samples):
        expected = full_logprobs(start, item.sample).detach().numpy()[item.sample.loss_mask[1:]]
        np.testing.assert_allclose(report.proximal_logprobs[at], expected, atol=1e-4)


def test_a_minibatch_has_the_loss_and_the_gradient_of_a_batch_of_its_own(checkpoint: Path) -> None:
    batch = random_batch(samples=7)
    counts = [int(item.sample.loss_mask.sum()) for item in batch.samples]
    plan = split_minibatches(counts, 3, seed=(0, 0))
    parts = [replace(batch, samples=tuple(batch.samples[i] for i in some)) for some in plan]

    # At this rate the weights stay, so the minibatches do not affect each other.
    together = _trainer(checkpoint, minibatches=3, lr=1e-30).step(batch).metrics
    alone = [_trainer(checkpoint, lr=1e-30).step(part).metrics for part in parts]

    assert sum(part["num_loss_tokens"] for part in alone) == together["num_loss_tokens"]
    for name in ("loss", "grad_norm"):
        assert together[name] == pytest.approx(np.mean([part[name] for part in alone]), rel=1e-4), name


def test_the_seed_and_the_number_of_the_step_decide_which_samples_share_a_minibatch(checkpoint: Path) -> None:
    batch = random_batch(samples=8)

    def norms(seed: int) -> list[float]:
        trainer = _trainer(checkpoint, minibatches=4, lr=1e-30, seed=seed)
        return [trainer.step(replace(batch, policy_version=3)).metrics["grad_norm"] for _ in range(3)]

    assert norms(0) == norms(0)
    assert len({*norms(0), *norms(1)}) == 6


def test_one_minibatch_reduces_to_a_ratio_of_exactly_one(checkpoint: Path) -> None:
    report = _trainer(checkpoint, minibatches=1).step(random_batch())

    assert report.metrics["ratio_max"] == 1.0
    assert report.metrics["clip_fraction_positive"] == report.metrics["clip_fraction_negative"] == 0


def test_log_prob_differences_are_reported_apart_for_tokens_of_the_current_version(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint)
    batch = random_batch(version=3)
    exact = trainer.logprobs([item.sample.token_ids for item in batch.samples])
    samples: list[TrainSample] = []
    for item, logprobs in zip(batch.samples, exact, strict=True):
        own = np.concatenate([np.zeros(1, np.float32), logprobs])
        # Tokens of the current version carry the trainer's own log-probs, earlier ones are off by 0.5.
        behavior = np.where(item.sample.token_versions == 3, own, own - 0.5).astype(np.float32)
        samples.append(TrainSample(sample=replace(item.sample, behavior_logprobs=behavior), advantages=item.advantages))

    metrics = trainer.step(replace(batch, samples=tuple(samples))).metrics

    assert metrics["max_logprob_difference"] < 1e-5
    assert metrics["behavior_log_weight_max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["num_fresh_tokens"] == sum(
        int((item.sample.token_versions[item.sample.loss_mask] == 3).sum()) for item in batch.samples
    )
    assert metrics["max_staleness"] == 2


def test_the_error_of_interrupted_model_calls_is_reported_apart(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint)
    ids = np.arange(40, 52, dtype=np.int32)
    turns = np.repeat(np.array([0, 1], np.int32), 6)
    # Turn 0 was cut by version 3 after two tokens, turn 1 began under version 3.
    versions = np.array([-1, -1, 2, 2, 3, 3, -1, -1, 3, 3, 3, 3], np.int32)
    own = np.concatenate([np.zeros(1, np.float32), trainer.logprobs([ids])[0]])
    off = np.zeros(12, np.float32)
    off[[2, 3]], off[[4, 5]] = 0.5, [0.25, 0.125]
    sample = Sample(
        token_ids=ids,
        loss_mask=versions >= 0,
        behavior_logprobs=np.where(versions >= 0, own - off, 0).astype(np.float32),
        token_versions=versions,
        turn_index=turns,
        temperatures=np.ones(12, np.float32),
    )
    item = TrainSample(sample=sample, advantages=np.where(versions >= 0, 1, 0).astype(np.float32))

    metrics = trainer.step(TrainBatch(samples=(item,), policy_version=3)).metrics

    assert metrics["num_interrupted_tokens"] == metrics["num_interrupted_fresh_tokens"] == 2
    assert metrics["max_interrupted_difference"] == pytest.approx(0.25, abs=1e-5)
    assert metrics["mean_interrupted_difference"] == pytest.approx(0.1875, abs=1e-5)
    assert metrics["num_fresh_tokens"] == 6
    assert metrics["mean_logprob_difference"] == pytest.approx(0.375 / 6, abs=1e-5)
    # One version later none of them can be compared any more, and they are still counted.
    later = trainer.step(TrainBatch(samples=(item,), policy_version=4)).metrics
    assert (later["num_interrupted_tokens"], later["num_interrupted_fresh_tokens"]) == (2, 0)
    assert "max_interrupted_difference" not in later


def test_samples_without_advantage_count_in_the_denominator_but_make_no_forward_pass(checkpoint: Path) -> None:
    batch = random_batch()
    silent = _with_advantages(batch, 0, 0.0)
    slow = slow_loss(load_plain(checkpoint, torch.float64), silent, AlgorithmConfig())

    report = _trainer(checkpoint).step(silent)
    metrics = report.metrics

    assert sorted(report.proximal_logprobs) == list(range(1, len(batch.samples)))
    assert metrics["loss"] == pytest.approx(slow, rel=1e-5)
    assert metrics["num_loss_tokens"] < metrics["loss_tokens"]


@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_with_nothing_to_learn_is_skipped_with_its_reason_and_the_version_moves_on(
    checkpoint: Path, masked: bool
) -> None:
    trainer = _trainer(checkpoint)
    trainer.step(random_batch(version=3))
    before = _weights(trainer)
    batch = random_batch(version=4)
    silent = tuple(
        TrainSample(
            sample=replace(item.sample, loss_mask=np.zeros_like(item.sample.loss_mask)) if masked else item.sample,
            advantages=np.zeros_like(item.advantages),
        )
        for item in batch.samples
    )

    report = trainer.step(TrainBatch(samples=silent, policy_version=4))

    assert report.skipped == ("no token is in the loss" if masked else "every advantage is 0")
    assert torch.equal(_weights(trainer), before)
    assert trainer.state.policy_version == 5
    assert trainer.state.bad_steps == 0


def test_an_empty_batch_is_skipped(checkpoint: Path) -> None:
    report = _trainer(checkpoint).step(TrainBatch(samples=(), policy_version=0))

    assert report.skipped == "no token is in the loss"


def test_a_loss_that_is_not_finite_never_reaches_the_weights_and_stops_the_run_after_a_few(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, max_bad_steps=2)
    before = _weights(trainer)
    poisoned = _with_advantages(random_batch(), 2, float("nan"))

    report = trainer.step(poisoned)

    assert report.skipped == "the loss is nan: not finite"
    assert all(np.isfinite(value) for value in report.metrics.values())
    assert torch.equal(_weights(trainer), before)
    with pytest.raises(TrainError, match="2 training steps in a row were not finite"):
        trainer.step(poisoned)


def test_a_good_step_in_between_starts_the_count_of_bad_ones_anew(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, max_bad_steps=2)
    poisoned = _with_advantages(random_batch(), 2, float("inf"))

    reports = [trainer.step(batch).skipped is None for batch in (poisoned, random_batch(), poisoned, random_batch())]

    assert reports == [False, True, False, True]


def test_only_the_minibatch_with_a_bad_number_is_left_out(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, minibatches=3)

    report = trainer.step(_with_advantages(random_batch(), 2, float("nan")))

    assert report.skipped is None
    assert report.metrics["bad_minibatches"] == 1
    assert report.metrics["optimizer_steps"] == 2
    assert trainer.state.bad_steps == 1
    assert bool(torch.isfinite(_weights(trainer)).all())


def test_a_token_over_the_staleness_bound_is_refused_before_anything_changes(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, AlgorithmConfig(max_staleness=1))
    before = _weights(trainer)

    with pytest.raises(StaleDataError, match="sampled by version 1 reached the trainer at version 3; at most 1"):
        trainer.step(random_batch(version=3, max_staleness=2))

    assert torch.equal(_weights(trainer), before)
    assert trainer.state.steps == 0


def test_a_masked_token_may_be_of_any_age(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, AlgorithmConfig(max_staleness=0))
    batch = random_batch(version=3)
    samples = tuple(
        TrainSample(
            sample=replace(item.sample, loss_mask=item.sample.loss_mask & (item.sample.token_versions == 3)),
            advantages=item.advantages,
        )
        for item in batch.samples
    )

    assert trainer.step(replace(batch, samples=samples)).metrics["max_staleness"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_versions": 9}, "policy versions from 9 to 9; expected 1 to 3"),
        ({"token_versions": 0}, "policy versions from 0 to 0; expected 1 to 3"),
        ({"token_versions": -1}, "policy versions from -1 to -1; expected 1 to 3"),
        ({"temperatures": 0}, "sampled at temperature 0"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(checkpoint: Path, change: dict[str, float], message: str) -> None:
    batch = random_batch(version=3, samples=1)
    [item] = batch.samples
    arrays = {name: np.full_like(getattr(item.sample, name), value) for name, value in change.items()}
    wrong = TrainSample(sample=replace(item.sample, **arrays), advantages=item.advantages)

    with pytest.raises(InvariantError, match=message):
        _trainer(checkpoint).step(replace(batch, samples=(wrong,)))


def test_the_learning_rate_follows_the_schedule_over_minibatches(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, schedule="linear", warmup_steps=4, minibatches=2)

    rates = [trainer.step(random_batch(seed=seed)).metrics["lr"] for seed in range(4)]

    # 20 optimizer steps, two a batch; the second of each is reported.
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3 * 15 / 16, 1e-3 * 13 / 16])


def test_logprobs_of_sequences_come_back_in_order_whatever_their_lengths(checkpoint: Path) -> None:
    trainer = _trainer(checkpoint, microbatch_tokens=50)
    random = np.random.default_rng(0)
    sequences = [random.integers(0, 300, length).astype(np.int32) for length in (7, 1, 30, 2, 0, 30, 90)]

    ours = trainer.logprobs(sequences)

    plain = load_plain(checkpoint)
    assert [len(part) for part in ours] == [6, 0, 29, 1, 0, 29, 89]
    for ids, part in zip(sequences, ours, strict=True):
        if len(ids) > 1:
            inputs = torch.tensor(ids.astype(np.int64))[None]
            slow = torch.log_softmax(plain(input_ids=inputs).logits[0, :-1], -1).gather(1, inputs[0, 1:, None])[:, 0]
            np.testing.assert_allclose(part, slow.detach().numpy(), atol=1e-5)


def test_logprobs_of_a_sequence_are_at_its_own_temperature(checkpoint: Path) -> None:
    ids, plain = np.arange(3, 40, dtype=np.int32), load_plain(checkpoint)
    inputs = torch.tensor(ids.astype(np.int64))[None]
    logits = plain(input_ids=inputs).logits[0, :-1].detach()
    temperatures = [0.5, 1.0, 2.0]
    ours = _trainer(checkpoint).logprobs([ids] * 3, temperatures)
    for temperature, part in zip(temperatures, ours, strict=True):
        slow = torch.log_softmax(logits / temperature, -1).gather(1, inputs[0, 1:, None])[:, 0]
        np.testing.assert_allclose(part, slow.numpy(), atol=1e-5)
