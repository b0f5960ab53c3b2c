"""The supervised warm start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.errors import ConfigError, TrainError
from agentrl.trainer.config import SftConfig
from agentrl.trainer.sft import EncodedExample, run_sft
from agentrl.weights.disk import verify_directory
from tests.trainer.helpers import load_plain


def _counting(count: int = 40, seed: int = 0) -> list[EncodedExample]:
    """Return sequences whose trained tokens count upwards."""
    random = np.random.default_rng(seed)
    examples: list[EncodedExample] = []
    for _ in range(count):
        length = int(random.integers(6, 24))
        ids = (int(random.integers(0, 50)) + np.arange(length)).astype(np.int32)
        examples.append(EncodedExample(token_ids=ids, loss_mask=np.arange(length) >= 3))
    return examples


def _config(**settings: object) -> SftConfig:
    return SftConfig.model_validate({"data": "unused", "steps": 60, "lr": 5e-3, "warmup_steps": 5, "threads": 1, **settings})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_warm_start_learns_and_writes_a_checkpoint_that_loads(tmp_path: Path, checkpoint: Path, optimizer: str) -> None:
    progress: list[tuple[int, float]] = []

    report = run_sft(
        checkpoint,
        tmp_path / "out",
        _config(optimizer=optimizer),
        _counting(),
        on_progress=lambda step, loss: progress.append((step, loss)),
    )

    assert [step for step, _ in progress] == list(range(1, 61))
    assert report.first_loss == progress[0][1]
    assert np.mean([loss for _, loss in progress[-5:]]) < 0.5 * report.first_loss
    verify_directory(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    load_plain(tmp_path / "out")


def test_the_first_loss_is_the_mean_cross_entropy_of_the_masked_tokens(tmp_path: Path, checkpoint: Path) -> None:
    examples = _counting(6)

    report = run_sft(checkpoint, tmp_path / "out", _config(steps=1), examples)

    model = load_plain(checkpoint)
    total, count = 0.0, 0
    for example in examples:
        ids = torch.tensor(example.token_ids.astype(np.int64))
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].double(), -1)
        for t in np.flatnonzero(example.loss_mask).tolist():
            total -= float(logprobs[t - 1, ids[t]].detach())
            count += 1
    assert report.first_loss == pytest.approx(total / count, rel=1e-5)
    assert report.trained_tokens == count


def test_the_same_seed_gives_the_same_weights_and_another_one_does_not(tmp_path: Path, checkpoint: Path) -> None:
    checksums: list[str] = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_sft(checkpoint, tmp_path / name, _config(steps=5, seed=seed, optimizer="muon"), _counting())
        checksums.append(verify_directory(tmp_path / name).checksum)

    assert checksums[0] == checksums[1] != checksums[2]


def test_a_loss_that_is_not_finite_stops_the_warm_start_and_writes_nothing(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(TrainError, match=r"warm start, step \d+: loss"):
        run_sft(checkpoint, tmp_path / "out", _config(lr=1e30, warmup_steps=0, max_grad_norm=1e30), _counting())

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([False, False, False], "expected at least one token of the assistant"),
        ([True, True, True], "expected at least one token of the assistant, after other tokens"),
        ([False, True], "conversation 0 has 3 tokens but 2 mask values"),
    ],
)
def test_a_conversation_that_trains_nothing_or_contradicts_itself_is_named(
    tmp_path: Path, checkpoint: Path, mask: list[bool], message: str
) -> None:
    example = EncodedExample(token_ids=np.arange(3, dtype=np.int32), loss_mask=np.array(mask))

    with pytest.raises(ConfigError, match=message):
        run_sft(checkpoint, tmp_path / "out", _config(), [example])


def test_no_conversations_is_a_config_error(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no conversations"):
        run_sft(checkpoint, tmp_path / "out", _config(), [])
