"""A critic in the trainer: what it predicts, what trains it, and what it leaves alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.config import LR_FACTOR, AlgorithmConfig
from agentrl.algo.prefixes import plan_passes
from agentrl.errors import ConfigError
from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shape import MeshShape
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.worker.client import launch_trainer
from agentrl.types import Float32Array
from tests.support.ranks import on_ranks
from tests.trainer.helpers import load_plain, random_batch, save_checkpoint, state_bytes, with_targets
from tests.trainer.parallel.steps import assert_same, make_trainer, outcome_of

pytestmark = pytest.mark.starts

GAE: dict[str, Any] = {"advantage": "token_gae", "terms": [{"value": {"clip": 0.2}}]}
KINDS = ("head", "trunk", "own")


def settings(kind: str, **more: object) -> dict[str, Any]:
    return {"algorithm": {**GAE, "critic": {"model": kind, "lr": 1e-2, **more}}, "max_grad_norm": 1e9}


def policy_bytes(path: Path, kind: str | None, steps: int = 2) -> dict[str, torch.Tensor]:
    trainer = make_trainer(Ranks(), path, {"max_grad_norm": 1e9} if kind is None else settings(kind))
    for number in range(steps):
        trainer.step(with_targets(random_batch(version=number + 1, seed=number)))
    return {name: parameter.detach().clone() for name, parameter in trainer.model.parameters.items()}


def test_a_critic_trains_the_policy_only_where_it_shares_the_trunk(checkpoint: Path) -> None:
    alone = policy_bytes(checkpoint, None)
    for kind, expected in (("head", True), ("own", True), ("trunk", False)):
        beside = policy_bytes(checkpoint, kind)
        assert all(torch.equal(beside[name], alone[name]) for name in alone) is expected, kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_critic_expects_nothing_and_learns_what_it_is_given(checkpoint: Path, kind: str) -> None:
    batch = random_batch(samples=4)
    targets = [np.where(item.sample.token_ids % 2, 1.0, -1.0).astype(np.float32) for item in batch.samples]
    ids = [item.sample.token_ids for item in batch.samples]
    trainer = make_trainer(Ranks(), checkpoint, {**settings(kind), "lr": 1e-3})
    before = trainer.values(ids)
    assert [len(values) for values in before] == [len(one) - 1 for one in ids]
    assert not any(values.any() for values in before)

    def error(values: list[Float32Array]) -> float:
        gaps = [
            (own - target[1:])[item.sample.loss_mask[1:]]
            for own, target, item in zip(values, targets, batch.samples, strict=True)
        ]
        return float((np.concatenate(gaps) ** 2).mean())

    norms: list[float] = []
    for _ in range(40):
        present = trainer.values(ids)
        given = tuple(
            replace(item, values=np.concatenate([[0], own]).astype(np.float32), value_targets=target)
            for item, own, target in zip(batch.samples, present, targets, strict=True)
        )
        norms.append(trainer.step(replace(batch, samples=given)).metrics["by_slot.value.grad_norm"])
    assert min(norms) > 0
    assert error(trainer.values(ids)) < 0.7 * error(before)


def test_the_gradient_of_a_shared_trunk_is_that_of_the_written_loss(checkpoint: Path) -> None:
    batch = with_targets(random_batch())
    batch = replace(batch, samples=tuple(replace(item, advantages=item.advantages * 0) for item in batch.samples))
    trainer = make_trainer(Ranks(), checkpoint, settings("trunk"))
    trainer.step(batch)  # the head leaves 0; with a head of 0 no gradient reaches the trunk
    [head, bias] = [trainer.optimizer_tensors()[f"critic.weight.head.{name}"].clone() for name in ("weight", "bias")]
    plain = load_plain(checkpoint)
    plain.load_state_dict(trainer.model.module.state_dict())

    losses: list[torch.Tensor] = []
    for item in batch.samples:
        assert item.values is not None
        assert item.value_targets is not None
        ids, mask = torch.tensor(item.sample.token_ids.astype(np.int64)), item.sample.loss_mask
        hidden = plain.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0, :-1]
        values = (hidden @ head + bias)[torch.from_numpy(mask[1:])]
        before, targets = torch.from_numpy(item.values[mask]), torch.from_numpy(item.value_targets[mask])
        bounded = torch.minimum(torch.maximum(values, before - 0.2), before + 0.2)
        losses.append(torch.maximum((values - targets) ** 2, (bounded - targets) ** 2))
    loss = torch.cat(losses).mean() * 0.5 / 2
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)

    metrics = trainer.step(batch).metrics
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["by_slot.value.squared_error"] > 0


def test_a_warm_up_trains_the_critic_alone(checkpoint: Path) -> None:
    trainer = make_trainer(Ranks(), checkpoint, settings("own", warmup_steps=2))
    before = state_bytes(trainer)
    changed: list[tuple[bool, bool]] = []
    rates: list[float] = []
    for number in range(3):
        report = trainer.step(with_targets(random_batch(version=number + 1, seed=number)))
        after = state_bytes(trainer)
        policy = any(after[name] != before[name] for name in trainer.model.parameters)
        changed.append((policy, after["critic.weight.head.weight"] != before["critic.weight.head.weight"]))
        assert report.skipped is None
        rates.append(report.metrics["lr"])
        before = after
    assert changed == [(False, True), (False, True), (True, True)]
    assert rates == [0.0, 0.0, 1e-3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_critic_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    batches = [with_targets(random_batch(version=version, seed=version), version) for version in range(1, 5)]
    straight = make_trainer(Ranks(), checkpoint, settings(kind))
    for batch in batches[:2]:
        straight.step(batch)
    save_checkpoint(straight, tmp_path / "c")
    for batch in batches[2:]:
        straight.step(batch)

    resumed = make_trainer(Ranks(), checkpoint, settings(kind))
    resumed.step(batches[3])  # what it has learned before is forgotten
    resumed.restore(read_checkpoint(tmp_path / "c"))
    for batch in batches[2:]:
        resumed.step(batch)
    assert state_bytes(resumed) == state_bytes(straight)
    ids = [item.sample.token_ids for item in batches[0].samples]
    assert [each.tobytes() for each in resumed.values(ids)] == [each.tobytes() for each in straight.values(ids)]


def test_a_checkpoint_without_the_critic_of_the_run_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    save_checkpoint(make_trainer(Ranks(), checkpoint, {}), tmp_path / "none")
    save_checkpoint(make_trainer(Ranks(), checkpoint, settings("own")), tmp_path / "own")
    trainer = make_trainer(Ranks(), checkpoint, settings("head"))
    trainer.step(with_targets(random_batch(version=1)))
    before = state_bytes(trainer)
    for name, message in (("none", "holds no critic"), ("own", "holds another critic")):
        with pytest.raises(ConfigError, match=message):
            trainer.restore(read_checkpoint(tmp_path / name))
    assert state_bytes(trainer) == before


def values_after_steps(ranks: Ranks, path: Path, kind: str) -> Any:  # noqa: ANN401 - an outcome and values
    # Nine passes of one sample each: of two ranks, one has a filler pass.
    # A small lr: AdamW moves an element of almost no gradient by a share of lr that rounding decides.
    more = {"max_grad_norm": 0.5, "microbatch_tokens": 1, "lr": 3e-5}
    trainer = make_trainer(ranks, path, {**settings(kind), **more})
    batches = [random_batch(version=number + 1, seed=number, samples=9) for number in range(3)]
    reports = [trainer.step(with_targets(batch, number)) for number, batch in enumerate(batches)]
    ids = [np.arange(1, 30, dtype=np.int32), np.arange(5, 9, dtype=np.int32)]
    return outcome_of(trainer, reports[-1]), trainer.values(ids)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [*((kind, MeshShape(dp=2)) for kind in KINDS), ("own", MeshShape(tp=2)), ("trunk", MeshShape(cp=2))],
    ids=[*KINDS, "own, tp", "trunk, cp"],
)
def test_two_ranks_train_a_critic_as_one_does(checkpoint: Path, kind: str, shape: MeshShape) -> None:
    alone, values = values_after_steps(Ranks(), checkpoint, kind)
    together = on_ranks(shape, values_after_steps, checkpoint, kind)
    assert_same([outcome for outcome, _ in together], alone)
    for _, found in together:
        for ours, theirs in zip(found, values, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


def test_values_without_a_critic_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"no critic; set algorithm\.critic"):
        make_trainer(Ranks(), checkpoint, {}).values([np.arange(4, dtype=np.int32)])


def test_branches_that_share_a_pass_have_the_values_and_the_reference_that_they_have_apart(checkpoint: Path) -> None:
    stem = np.arange(1, 60, dtype=np.int32)
    ids = [np.concatenate([stem, np.array([7, one, 9], np.int32)]) for one in range(20, 24)]
    temperatures = [np.full(len(each), 0.7, np.float32) for each in ids]
    algorithm = AlgorithmConfig.model_validate({**settings("own")["algorithm"], "reference": {"reward_weight": 0.1}})
    found: list[list[Float32Array]] = []
    for share in (True, False):
        model = PolicyModel(checkpoint, device=torch.device("cpu"), share=share)
        assert model.shares_prefixes is share
        trainer = PolicyTrainer(model, TrainerConfig(minibatches=1, lr=1e-3), algorithm, total_steps=10)
        trainer.step(with_targets(random_batch(version=1)))
        found.append([*trainer.values(ids), *trainer.numbers("reference", ids, temperatures)])
    assert plan_passes(ids, 4096, share=True).shared
    for together, apart in zip(*found, strict=True):
        np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-5)


async def test_the_values_of_a_worker_are_those_of_the_trainer_in_this_process(checkpoint: Path, tmp_path: Path) -> None:
    local = make_trainer(Ranks(), checkpoint, settings("own"))
    config = TrainerConfig(lr=1e-3, minibatches=1, max_grad_norm=1e9)
    algorithm = AlgorithmConfig.model_validate(settings("own")["algorithm"])
    launched = launch_trainer(
        config, algorithm, model_path=checkpoint, total_steps=10, seed=5, log_path=tmp_path / "trainer.log"
    )
    batch = with_targets(random_batch(version=1))
    ids = [np.arange(1, 30, dtype=np.int32), np.array([1], np.int32)]
    async with launched as trainer:
        report = await trainer.step(batch)
        expected = local.step(batch)
        assert report.metrics["by_slot.value.grad_norm"] == expected.metrics["by_slot.value.grad_norm"]
        found = await trainer.values(ids)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in local.values(ids)]
    assert found[0].any()


@pytest.mark.parametrize(("given", "lr"), [({"lr": 3e-2}, 3e-2), ({"lr": None}, LR_FACTOR * 1e-3)])
def test_the_rate_of_a_critic_follows_the_schedule_of_the_policy(checkpoint: Path, given: dict[str, Any], lr: float) -> None:
    trainer = make_trainer(Ranks(), checkpoint, {**settings("head", **given), "warmup_steps": 10})
    trainer.step(with_targets(random_batch(version=1)))
    bias = trainer.optimizer_tensors()["critic.weight.head.bias"]
    assert abs(float(bias)) == pytest.approx(lr / 10, rel=1e-3), "AdamW moves by its rate in the first step"


def test_the_gradient_of_a_critic_is_clipped_by_itself(checkpoint: Path) -> None:
    trainer = make_trainer(Ranks(), checkpoint, {**settings("head"), "max_grad_norm": 1e-3, "betas": (0.75, 0.95)})
    metrics = trainer.step(with_targets(random_batch(version=1))).metrics
    assert metrics["by_slot.value.grad_norm"] > 1e-2
    tensors = trainer.optimizer_tensors()
    moments = torch.cat([tensors[f"critic.exp_avg.head.{name}"].flatten() for name in ("weight", "bias")])
    assert float(moments.norm()) == pytest.approx(0.25 * 1e-3, rel=1e-3)
