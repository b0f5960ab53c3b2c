"""A dense term trains what has no advantage; several passes over a batch count it once and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.parallel.ranks import Ranks
from tests.trainer.helpers import random_batch, save_checkpoint, state_bytes, with_targets, without_advantages
from tests.trainer.parallel.steps import make_trainer

DENSE: dict[str, dict[str, Any]] = {
    "entropy": {"terms": [{"entropy": 0.1}]},
    "kl": {"terms": [{"kl": {"weight": 0.1, "k": 1}}], "reference": {}},
    "log_ratio": {"terms": [{"log_ratio": 0.1}]},
    "value": {"advantage": "turn_gae", "critic": {"model": "trunk"}},
}


@pytest.mark.parametrize("term", DENSE)
def test_a_dense_term_computes_and_trains_samples_without_an_advantage(checkpoint: Path, term: str) -> None:
    batch = without_advantages(with_targets(random_batch(version=1)))
    dense = make_trainer(Ranks(), checkpoint, {"algorithm": DENSE[term]})
    before = state_bytes(dense)
    report = dense.step(batch)
    assert report.skipped is None
    assert report.metrics["optimizer_steps"] == 1
    assert report.metrics["computed_tokens"] > 0
    assert set(report.proximal_logprobs) == set(range(len(batch.samples)))
    after = state_bytes(dense)
    assert any(after[name] != value for name, value in before.items() if not name.startswith("random_state"))
    if term == "value":
        assert after["critic.weight.head.bias"] != before["critic.weight.head.bias"]

    sparse = make_trainer(Ranks(), checkpoint, {})
    report = sparse.step(batch)
    assert (report.skipped, report.metrics["computed_tokens"]) == ("every advantage is 0", 0)


def test_several_passes_count_a_token_once(checkpoint: Path) -> None:
    batch = random_batch()
    once, often = (make_trainer(Ranks(), checkpoint, {"epochs": epochs, "minibatches": 2}).step(batch) for epochs in (1, 3))
    counts = [name for name in once.metrics if name.startswith(("num_", "loss_tokens"))]
    assert len(counts) > 5
    assert {name: often.metrics[name] for name in counts} == {name: once.metrics[name] for name in counts}
    assert often.metrics["computed_tokens"] == 3 * once.metrics["computed_tokens"]
    assert often.metrics["optimizer_steps"] == 6


def test_a_resumed_run_with_several_passes_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"epochs": 2, "minibatches": 3, "schedule": "linear", "algorithm": DENSE["entropy"]}
    batches = [random_batch(version=version, seed=version) for version in range(1, 4)]
    straight = make_trainer(Ranks(), checkpoint, settings)
    straight.step(batches[0])
    save_checkpoint(straight, tmp_path / "c")
    resumed = make_trainer(Ranks(), checkpoint, settings)
    resumed.restore(read_checkpoint(tmp_path / "c"))
    lrs = [[trainer.step(batch).metrics["lr"] for batch in batches[1:]] for trainer in (straight, resumed)]
    assert lrs[0] == lrs[1]
    assert lrs[0][0] > lrs[0][1]
    assert resumed.state == straight.state
    assert resumed.state.optimizer_steps == 18
    assert state_bytes(resumed) == state_bytes(straight)
