"""The slots of an algorithm in a training step: a user's functions, dense terms, several passes, and bad results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.packing import split_minibatches
from agentrl.errors import ConfigError, TrainError
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl_testing.properties.plain_episodes import plain_episode, plain_turn
from tests.trainer.helpers import full_logprobs, load_plain, random_batch

MINE = """
from dataclasses import replace
import torch
from agentrl.algo.loss_batch import LossBatch, TokenLoss, Weights, maximum, mean
from agentrl.config.base import Config

class Scale(Config):
    by: float = 1.0

def plain(batch: LossBatch, options: Scale) -> TokenLoss:
    loss = -options.by * batch.advantages * batch.current_logprobs
    return TokenLoss(loss=loss, metrics={"up": mean(batch.advantages > 0)})

def told(batch):
    metrics = {name: mean(getattr(batch, name)) for name in ("role", "player", "group")}
    return TokenLoss(loss=plain(batch, Scale()).loss, metrics=metrics)

def no_number(batch):
    return TokenLoss(loss=batch.current_logprobs * float("nan"))

def short(batch):
    return TokenLoss(loss=batch.current_logprobs[1:])

def total(batch):
    return batch.current_logprobs.sum()

def reserved(batch):
    return TokenLoss(loss=batch.current_logprobs, metrics={"loss": mean(batch.advantages)})

def nan_metric(batch):
    metrics = {"fine": mean(batch.advantages), "x": mean(batch.advantages / 0 * 0)}
    return TokenLoss(loss=plain(batch, Scale()).loss, metrics=metrics)

def nan_peak(batch):
    return TokenLoss(loss=plain(batch, Scale()).loss, metrics={"peak": maximum(batch.advantages * float("nan"))})

def nan_weight_metric(batch):
    ones = torch.ones_like(batch.advantages)
    return Weights(weight=ones, keep=ones > 0, metrics={"x": mean(ones * float("nan"))})

def nan_gradient(batch):
    zero = batch.current_logprobs - batch.current_logprobs.detach()
    return TokenLoss(loss=plain(batch, Scale()).loss + 0.0 * (zero * zero).sqrt())

def raising(batch):
    raise KeyError("x")

def wider(batch):
    ones = torch.ones(len(batch.turn) + 1)
    return Weights(weight=ones, keep=ones > 0)

def soft(batch):
    return Weights(weight=batch.advantages * 0 + 1, keep=batch.advantages)

unit = 3
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_slot_functions.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_slot_functions"


def trainer_of(path: Path, algorithm: dict[str, object], **settings: object) -> PolicyTrainer:
    config = TrainerConfig.model_validate({"lr": 1e-3, "minibatches": 1, "max_grad_norm": 1e9, **settings})
    model = PolicyModel(path, device=torch.device("cpu"))
    return PolicyTrainer(model, config, AlgorithmConfig.model_validate(algorithm), total_steps=10)


def in_module(name: str, value: Any) -> Any:  # noqa: ANN401 - a part of a run file
    """Return `value` with `name` for each {}."""
    if isinstance(value, dict):
        return {str(key).replace("{}", name): in_module(name, each) for key, each in value.items()}
    if isinstance(value, list):
        return [in_module(name, each) for each in value]
    return value.replace("{}", name) if isinstance(value, str) else value


def weights_of(trainer: PolicyTrainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters.values()])


def without_advantages(batch: TrainBatch) -> TrainBatch:
    return replace(batch, samples=tuple(replace(item, advantages=item.advantages * 0) for item in batch.samples))


def test_a_loss_of_the_user_trains_as_the_bundled_one_that_it_copies(checkpoint: Path, mine: str) -> None:
    batch = random_batch()
    own = trainer_of(checkpoint, {"policy_loss": {f"{mine}:plain": {"by": 1.0}}, "correction": "none"})
    bundled = trainer_of(checkpoint, {"policy_loss": "reinforce", "correction": "none"})
    metrics = own.step(batch).metrics
    assert metrics["loss"] == bundled.step(batch).metrics["loss"]
    assert torch.equal(weights_of(own), weights_of(bundled))
    signs = np.concatenate([item.advantages[item.sample.loss_mask] > 0 for item in batch.samples])
    assert metrics["by_slot.plain.up"] == pytest.approx(signs.mean())


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"policy_loss": "{}:no_number"}, r"algorithm\.policy_loss: .*:no_number returned NaN or infinity"),
        ({"policy_loss": "{}:short"}, r"algorithm\.policy_loss: .*:short returned loss of shape .*one value for each token"),
        ({"policy_loss": "{}:total"}, r"algorithm\.policy_loss: .*:total returned a Tensor; return a TokenLoss"),
        ({"policy_loss": "{}:reserved"}, r"algorithm\.policy_loss: .*:reserved returned a metric named 'loss'"),
        ({"policy_loss": "{}:nan_metric"}, r"algorithm\.policy_loss: .*:nan_metric returned the metric x as NaN for finite"),
        ({"policy_loss": "{}:nan_peak"}, r"algorithm\.policy_loss: .*:nan_peak returned the metric peak as NaN for finite"),
        ({"terms": [{"{}:nan_metric": {"weight": 1}}]}, r"algorithm\.terms: .*:nan_metric returned the metric x as NaN"),
        ({"correction": "{}:nan_weight_metric"}, r"algorithm\.correction\.token: .* returned the metric x as NaN"),
        ({"policy_loss": "{}:raising"}, r"algorithm\.policy_loss: .*:raising raised KeyError: 'x'; fix the function"),
        ({"correction": "{}:wider"}, r"algorithm\.correction\.token: .*:wider returned weight of shape .*none can be added"),
        ({"correction": "{}:soft"}, r"algorithm\.correction\.token: .*:soft returned keep of torch\.float32; return bool"),
        ({"policy_loss": "{}:unit"}, r"algorithm\.policy_loss: .*:unit is no function but a int"),
        ({"policy_loss": "{}:gone"}, r"algorithm\.policy_loss: module .* has no 'gone'"),
        ({"policy_loss": "no_such_module_here:f"}, r"algorithm\.policy_loss: there is no module 'no_such_module_here'"),
        ({"policy_loss": {"{}:plain": {"to": 1}}}, r"algorithm\.policy_loss: .*:plain has no option 'to'; its options: by"),
        (
            {"terms": [{"{}:plain": {"weight": 1, "by": "x"}}]},
            r"algorithm\.terms: .*:plain\.by: input should be a valid number",
        ),
    ],
)
def test_a_function_that_does_not_fit_is_named_with_its_slot_and_changes_no_weight(
    checkpoint: Path, mine: str, algorithm: dict[str, Any], message: str
) -> None:
    fields = in_module(mine, algorithm)
    made: list[PolicyTrainer] = []

    def step() -> None:
        made.append(trainer_of(checkpoint, fields))
        made[0].step(random_batch())

    with pytest.raises(ConfigError, match=message):
        step()
    before = weights_of(trainer_of(checkpoint, {}))
    assert all(torch.equal(weights_of(trainer), before) for trainer in made)


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        ({"policy_loss": "{}:nan_gradient"}, "algorithm.policy_loss: {}:nan_gradient"),
        ({"terms": [{"{}:nan_gradient": {"weight": 1}}]}, "algorithm.terms: {}:nan_gradient"),
        (
            {"policy_loss": "{}:nan_gradient", "terms": [{"{}:plain": {"weight": 1}}, {"entropy": 0.1}]},
            "algorithm.policy_loss: {}:nan_gradient and algorithm.terms: {}:plain",
        ),
    ],
)
def test_a_gradient_that_is_nan_although_the_loss_is_finite_names_the_functions_of_the_user(
    checkpoint: Path, mine: str, algorithm: dict[str, Any], named: str
) -> None:
    trainer = trainer_of(checkpoint, in_module(mine, algorithm), max_bad_steps=2)
    before = weights_of(trainer)
    expected = f"the gradient norm is nan although the loss is finite ({named.replace('{}', mine)} may make it so"
    skipped = trainer.step(random_batch()).skipped
    assert skipped is not None
    assert skipped.startswith(expected)
    with pytest.raises(TrainError, match=f"{re.escape(expected)}.*agentrl_testing.check_policy_loss"):
        trainer.step(random_batch())
    assert torch.equal(weights_of(trainer), before)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_an_entropy_term_trains_tokens_without_an_advantage(checkpoint: Path, temperature: float) -> None:
    batch = without_advantages(random_batch(temperature=temperature))
    trainer = trainer_of(checkpoint, {"terms": [{"entropy": 0.5}]})
    report = trainer.step(batch)

    plain = load_plain(checkpoint)
    entropies: list[torch.Tensor] = []
    for item in batch.samples:
        ids = torch.tensor(item.sample.token_ids.astype(np.int64))
        every = torch.log_softmax(plain(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature, -1)
        entropies.append(-(every.exp() * every).sum(-1)[torch.from_numpy(item.sample.loss_mask[1:])])
    loss = -0.5 * torch.cat(entropies).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)

    assert report.skipped is None
    assert report.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert report.metrics["by_slot.entropy.weight"] == 0.5
    assert len(report.proximal_logprobs) == len(batch.samples)
    assert trainer_of(checkpoint, {}).step(batch).skipped == "every advantage is 0"


def test_several_passes_clip_around_the_weights_before_the_first(checkpoint: Path) -> None:
    batch = random_batch()
    trainer = trainer_of(checkpoint, {}, epochs=3, minibatches=2, lr=1e-2)
    plain = load_plain(checkpoint)
    report = trainer.step(batch)
    assert (report.metrics["optimizer_steps"], trainer.state.optimizer_steps) == (6, 6)
    assert report.metrics["ratio_max"] > 1
    for at, found in report.proximal_logprobs.items():
        sample = batch.samples[at].sample
        expected = full_logprobs(plain, sample)[torch.from_numpy(sample.loss_mask[1:])].detach().numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_schedule_counts_the_minibatches_of_each_pass_and_ends_with_the_last_one(checkpoint: Path) -> None:
    trainer = trainer_of(checkpoint, {}, epochs=3, minibatches=2, schedule="linear")  # of 10 batches, so 60 steps
    rates = [trainer.step(random_batch(version=version)).metrics["lr"] for version in (3, 4)]
    assert rates == pytest.approx([1e-3 * (1 - 5 / 60), 1e-3 * (1 - 11 / 60)])


def test_a_loss_sees_the_role_player_and_group_of_each_token(checkpoint: Path, mine: str) -> None:
    many, random = random_batch(), np.random.default_rng(1)
    items = [
        replace(item, group=10 + at % 3, roles=random.integers(0, 5, size), players=random.integers(0, 3, size))
        for at, item in enumerate(many.samples)
        for size in [len(item.sample.token_ids)]
    ]
    trainer = trainer_of(checkpoint, {"policy_loss": f"{mine}:told", "correction": "none"}, microbatch_tokens=1000)
    metrics = trainer.step(replace(many, samples=tuple(items))).metrics
    trained = [item.sample.loss_mask for item in items]

    def mean_of(arrays: Sequence[np.ndarray]) -> float:
        return float(np.concatenate([own[mask] for own, mask in zip(arrays, trained, strict=True)]).mean())

    groups = [np.full(len(mask), item.group - 10) for item, mask in zip(items, trained, strict=True)]
    assert metrics["by_slot.told.group"] == pytest.approx(mean_of(groups))
    for name, arrays in (("role", [one.roles for one in items]), ("player", [one.players for one in items])):
        assert metrics[f"by_slot.told.{name}"] == pytest.approx(mean_of([own for own in arrays if own is not None]))


def test_a_second_pass_is_centred_on_the_weights_before_the_first(checkpoint: Path) -> None:
    once, twice = (trainer_of(checkpoint, {}, epochs=epochs, lr=1e-2).step(random_batch()).metrics for epochs in (1, 2))
    assert once["ratio_max"] == 1.0, "the only step of one pass is taken where its centre is"
    assert twice["ratio_max"] > 1.001


def test_each_pass_over_each_batch_deals_the_samples_anew(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[int, ...]] = []

    def split(loss_tokens: Sequence[int], n: int, *, seed: tuple[int, ...]) -> list[list[int]]:
        seeds.append(seed)
        return split_minibatches(loss_tokens, n, seed=seed)

    monkeypatch.setattr("agentrl.trainer.policy.split_minibatches", split)
    trainer = trainer_of(checkpoint, {}, epochs=3, minibatches=2)
    for version in (1, 2):
        trainer.step(random_batch(version=version))
    assert len(set(seeds)) == len(seeds) == 6


def test_a_mean_over_turns_counts_those_of_each_sample_apart(checkpoint: Path) -> None:
    batch = random_batch()
    trainer = trainer_of(checkpoint, {"policy_loss": "reinforce", "correction": "none", "aggregate": "turn"})
    loss = trainer.step(batch).metrics["loss"]
    plain, means = load_plain(checkpoint), list[float]()
    for item in batch.samples:
        with torch.no_grad():
            logprobs = np.concatenate([[0.0], full_logprobs(plain, item.sample).numpy()])
        for turn in set(item.sample.turn_index[item.sample.loss_mask].tolist()):
            of_turn = item.sample.loss_mask & (item.sample.turn_index == turn)
            means.append(float((-item.advantages[of_turn] * logprobs[of_turn]).mean()))
    assert loss == pytest.approx(sum(means) / len(means), rel=1e-4)


def forked_batch() -> TrainBatch:
    """Return the branches of an episode that forks after its first and its second turn, and one of 3 tokens."""
    turns = [
        plain_turn(tokens=5, context=2),
        *(plain_turn(parent=0, tokens=tokens, context=2) for tokens in (2, 3)),
        plain_turn(parent=1, tokens=4),
        plain_turn(parent=1, tokens=7),
    ]
    episodes = [plain_episode(turns, 1.0), plain_episode([plain_turn(tokens=3)], 1.0)]
    random, samples = np.random.default_rng(5), list[TrainSample]()

    def ids(like: np.ndarray) -> np.ndarray:
        return random.integers(0, 300, len(like)).astype(np.int32)

    for episode in episodes:
        own = [replace(one, context_ids=ids(one.context_ids), output_ids=ids(one.output_ids)) for one in episode.turns]
        for sample in replace(episode, turns=tuple(own)).branches():
            advantages = np.where(sample.loss_mask, random.normal(size=len(sample.token_ids)), 0)
            known = replace(sample, token_versions=np.where(sample.loss_mask, 1, -1).astype(np.int32))
            samples.append(TrainSample(sample=known, advantages=advantages.astype(np.float32)))
    return TrainBatch(samples=tuple(samples), policy_version=1)


@pytest.mark.parametrize(
    ("aggregate", "weights"),
    [
        # Of turns 0 and 2, of 1 and 3, of 4, and of the other episode: a branch trains what no branch before it did.
        ("sequence", [[1 / 8 / 4] * 8, [1 / 6 / 4] * 6, [1 / 7 / 4] * 7, [1 / 3 / 4] * 3]),
        ("turn", [[1 / 5 / 6] * 5 + [1 / 3 / 6] * 3, [1 / 2 / 6] * 2 + [1 / 4 / 6] * 4, [1 / 7 / 6] * 7, [1 / 3 / 6] * 3]),
        ({"fixed": 8}, [[1 / 32] * count for count in (8, 6, 7, 3)]),
        ("token", [[1 / 24] * count for count in (8, 6, 7, 3)]),
    ],
)
def test_what_branches_share_weighs_once_as_a_part_of_the_first_of_them(
    checkpoint: Path, aggregate: object, weights: Sequence[Sequence[float]]
) -> None:
    batch, plain = forked_batch(), load_plain(checkpoint)
    trainer = trainer_of(checkpoint, {"policy_loss": "reinforce", "correction": "none", "aggregate": aggregate})
    expected = 0.0
    for item, own in zip(batch.samples, weights, strict=True):
        with torch.no_grad():
            logprobs = np.concatenate([[0.0], full_logprobs(plain, item.sample).numpy()])
        trained = item.sample.loss_mask
        expected -= float((np.array(own) * item.advantages[trained] * logprobs[trained]).sum())
    assert trainer.step(batch).metrics["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_center_without_a_forward_pass_needs_none(checkpoint: Path) -> None:
    batch = random_batch()
    for proximal in ("behavior", "versions"):
        trainer = trainer_of(checkpoint, {"correction": {"proximal": proximal}}, minibatches=2)
        metrics = trainer.step(batch).metrics
        assert "max_logprob_difference" not in metrics  # there is nothing to compare the servers with
        assert metrics["optimizer_steps"] == 2


def test_the_guard_scales_the_learning_rate_of_each_minibatch_by_its_effective_samples(checkpoint: Path) -> None:
    batch = random_batch()
    guarded = trainer_of(checkpoint, {"guard": "effective_samples"})
    alone = trainer_of(checkpoint, {})
    metrics, before = guarded.step(batch).metrics, alone.step(batch).metrics
    model = load_plain(checkpoint)
    with torch.no_grad():
        logs = [
            float(
                (full_logprobs(model, item.sample) - torch.tensor(item.sample.behavior_logprobs[1:])).double()[trained].sum()
            )
            for item in batch.samples
            for trained in [torch.tensor(item.sample.loss_mask[1:])]
        ]
    weights = np.exp(logs)
    ratio = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert ratio < 0.9
    assert metrics["sample_ess_ratio"] == before["sample_ess_ratio"] == pytest.approx(ratio, rel=1e-3)
    assert metrics["guard_factor"] == pytest.approx(ratio**0.5, rel=1e-3)
    assert (before["guard_factor"], before["lr"]) == (1.0, 1e-3)
    assert metrics["lr"] == 1e-3 * metrics["guard_factor"]


def test_a_guard_of_the_user_that_returns_no_factor_leaves_the_weights(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_slot_guards.py").write_text("def half(ratio): return 0.5\ndef double(ratio): return 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert trainer_of(checkpoint, {"guard": "my_slot_guards:half"}).step(random_batch()).metrics["lr"] == 5e-4
    trainer = trainer_of(checkpoint, {"guard": "my_slot_guards:double"})
    before = weights_of(trainer)
    with pytest.raises(ConfigError, match=r"algorithm\.guard: my_slot_guards:double returned 2\.0 .* from 0 to 1"):
        trainer.step(random_batch())
    assert torch.equal(weights_of(trainer), before)
