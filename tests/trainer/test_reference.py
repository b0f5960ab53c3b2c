"""A reference policy in the trainer: which weights it has, and what the KL to it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.trainer.base import TrainBatch
from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.types import Float32Array
from tests.support.ranks import on_ranks
from tests.trainer.helpers import full_logprobs, load_plain, random_batch, save_checkpoint, state_bytes, without_advantages
from tests.trainer.parallel.steps import assert_same, make_trainer, outcome_of

pytestmark = pytest.mark.starts


def settings(k: int = 2, **reference: object) -> dict[str, Any]:
    return {"algorithm": {"terms": [{"kl": {"weight": 0.5, "k": k}}], "reference": reference}, "max_grad_norm": 1e9}


def numbers_of(batch: TrainBatch) -> tuple[list[np.ndarray], list[Float32Array]]:
    return [item.sample.token_ids for item in batch.samples], [item.sample.temperatures for item in batch.samples]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_gradient_is_that_of_the_written_kl_to_the_weights_of_the_beginning(checkpoint: Path, k: int) -> None:
    trainer = make_trainer(Ranks(), checkpoint, {**settings(k), "lr": 1e-2})
    trainer.step(random_batch(version=1))  # away from the reference, where the KL is 0
    batch = without_advantages(random_batch(version=2, seed=1, temperature=0.7))
    plain, start = load_plain(checkpoint), load_plain(checkpoint)
    plain.load_state_dict(trainer.model.module.state_dict())

    losses: list[torch.Tensor] = []
    for item in batch.samples:
        at = torch.from_numpy(item.sample.loss_mask[1:])
        d = (full_logprobs(plain, item.sample) - full_logprobs(start, item.sample).detach())[at]
        losses.append({1: d, 2: d.square() / 2, 3: torch.exp(-d) - 1 + d}[k])
    loss = 0.5 * torch.cat(losses).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)

    report = trainer.step(batch)
    assert report.skipped is None
    assert report.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert report.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_a_reference_that_is_refreshed_is_a_past_version(checkpoint: Path) -> None:
    trainer = make_trainer(Ranks(), checkpoint, {**settings(refresh_every=2), "lr": 1e-2})
    ids, temperatures = numbers_of(random_batch())
    policies = [trainer.logprobs(ids)]
    references = [trainer.numbers("reference", ids, temperatures)]
    for number in range(4):
        trainer.step(random_batch(version=number + 1, seed=number))
        policies.append(trainer.logprobs(ids))
        references.append(trainer.numbers("reference", ids, temperatures))
    for step, version in enumerate([0, 0, 2, 2, 4]):
        assert [one.tobytes() for one in references[step]] == [one.tobytes() for one in policies[version]], step
    assert policies[0][0].tobytes() != policies[2][0].tobytes()


@pytest.mark.parametrize("refresh_every", [0, 2])
def test_a_restored_trainer_has_the_reference_that_it_had(checkpoint: Path, tmp_path: Path, refresh_every: int) -> None:
    batches = [random_batch(version=version, seed=version) for version in range(1, 6)]
    straight = make_trainer(Ranks(), checkpoint, settings(refresh_every=refresh_every))
    for batch in batches[:3]:
        straight.step(batch)
    save_checkpoint(straight, tmp_path / "c")
    resumed = make_trainer(Ranks(), checkpoint, settings(refresh_every=refresh_every))
    resumed.restore(read_checkpoint(tmp_path / "c"))
    for trainer in (straight, resumed):
        for batch in batches[3:]:
            trainer.step(batch)
    assert state_bytes(resumed) == state_bytes(straight)
    numbers = [trainer.numbers("reference", *numbers_of(batches[0])) for trainer in (straight, resumed)]
    assert [one.tobytes() for one in numbers[0]] == [one.tobytes() for one in numbers[1]]


def test_a_checkpoint_without_the_reference_of_the_run_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    save_checkpoint(make_trainer(Ranks(), checkpoint, settings()), tmp_path / "c")
    trainer = make_trainer(Ranks(), checkpoint, settings(refresh_every=1))
    trainer.step(random_batch(version=1))
    before = state_bytes(trainer)
    with pytest.raises(ConfigError, match=r"holds no reference model: .*algorithm\.reference\.refresh_every"):
        trainer.restore(read_checkpoint(tmp_path / "c"))
    assert state_bytes(trainer) == before
    with pytest.raises(ConfigError, match=r"no reference; set algorithm\.reference"):
        make_trainer(Ranks(), checkpoint, {}).numbers("reference", *numbers_of(random_batch()))


def steps_to_a_reference(ranks: Ranks, path: Path) -> Any:  # noqa: ANN401 - an outcome and log-probs
    # Nine passes of one sample each: one rank has a filler pass.
    more = {"max_grad_norm": 0.5, "microbatch_tokens": 1, "lr": 3e-5}
    trainer = make_trainer(ranks, path, {**settings(3, refresh_every=2), **more})
    batches = [random_batch(version=number + 1, seed=number, samples=9) for number in range(3)]
    reports = [trainer.step(without_advantages(batch)) for batch in batches]
    return outcome_of(trainer, reports[-1]), trainer.numbers("reference", *numbers_of(random_batch()))


def test_two_ranks_train_towards_a_reference_as_one_does(checkpoint: Path) -> None:
    alone, logprobs = steps_to_a_reference(Ranks(), checkpoint)
    together = on_ranks(2, steps_to_a_reference, checkpoint)
    assert_same([outcome for outcome, _ in together], alone)
    for _, found in together:
        for ours, theirs in zip(found, logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
