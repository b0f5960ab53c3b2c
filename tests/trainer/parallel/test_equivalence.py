"""A trainer of several ranks does what a trainer of one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agentrl.errors import ConfigError, InvariantError
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shape import MeshShape
from tests.support.ranks import on_ranks
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import load_plain
from tests.trainer.parallel.steps import IDS, assert_same, make_trainer, three_steps

_TEMPERATURES = [0.7, 1.0, 1.0]
# Where sequences are cut, gradients are summed in another order. AdamW divides by their size, so in its first steps a weight
# whose gradient is rounding noise moves by the learning rate in a random direction.
_SMALL_STEPS = {"lr": 5e-5, "microbatch_tokens": 64}


@pytest.mark.parametrize(
    ("mesh", "arch", "settings"),
    [
        (2, "qwen3", {"microbatch_tokens": 64}),
        (MeshShape(cp=2), "qwen3", _SMALL_STEPS),
        (2, "llama", {"lr": 1e-4, "minibatches": 3, "microbatch_tokens": 100, "gradient_checkpointing": True}),
        pytest.param(
            *(MeshShape(dp=2, cp=2), "qwen3", {**_SMALL_STEPS, "minibatches": 3, "gradient_checkpointing": True}),
            marks=pytest.mark.external,
        ),
        pytest.param(*(MeshShape(cp=4), "qwen3", {**_SMALL_STEPS, "minibatches": 2}), marks=pytest.mark.external),
        pytest.param(
            *(MeshShape(dp=2, replicate=2), "qwen3", {"minibatches": 2, "microbatch_tokens": 64}), marks=pytest.mark.external
        ),
        pytest.param(
            *(4, "qwen3", {"minibatches": 2, "weight_decay": 0.1, "microbatch_tokens": 4096}), marks=pytest.mark.external
        ),
    ],
)
def test_weights_and_metrics_are_those_of_one_process(
    tmp_path: Path, mesh: int | MeshShape, arch: Architecture, settings: dict[str, Any]
) -> None:
    path = tiny_checkpoint(tmp_path / "model", arch=arch)
    alone = three_steps(Ranks(), path, settings)

    assert_same(on_ranks(mesh, three_steps, path, settings), alone)


def bfloat16_logprobs(ranks: Ranks, path: Path) -> list[NDArray[np.float32]]:
    trainer = make_trainer(ranks, path, {"dtype": "bfloat16"})
    return [
        trainer.logprobs([ids], [at])[0] for ids, at in zip(IDS, _TEMPERATURES, strict=True)
    ]  # one by one: padding changes how bfloat16 is rounded


@pytest.mark.parametrize("world", [1, 2, pytest.param(MeshShape(cp=2), marks=pytest.mark.external)])
def test_bfloat16_log_probs_are_those_of_a_bfloat16_model(tmp_path: Path, world: int | MeshShape) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    plain = load_plain(path, torch.bfloat16)
    expected: list[NDArray[np.float32]] = []
    for ids, temperature in zip(IDS, _TEMPERATURES, strict=True):
        tokens = torch.tensor(ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = plain(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        chosen = torch.log_softmax(logits / temperature, -1).gather(1, tokens[0, 1:, None])[:, 0]
        expected.append(chosen.numpy())

    for found in on_ranks(world, bfloat16_logprobs, path):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def ids_out_of_range(ranks: Ranks, path: Path) -> str:
    trainer = make_trainer(ranks, path, {})
    bad = [np.array([1, 2, 3], np.int32), np.array([1, 10_000], np.int32)]
    try:
        trainer.logprobs(bad)
    except InvariantError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_bad_id_is_an_error_on_every_rank_and_no_rank_waits(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    found = on_ranks(2, ids_out_of_range, path)
    assert [text.partition(":")[0] for text in found] == ["InvariantError", "InvariantError"]


def model_that_one_rank_lacks(ranks: Ranks, path: Path) -> str:
    try:
        PolicyModel(path if ranks.rank == 0 else path / "missing", device=torch.device("cpu"), ranks=ranks)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_model_that_one_rank_lacks_is_an_error_on_every_rank_and_no_rank_waits(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    message = f"{path / 'missing'}: expected a local Hugging Face model directory with a config.json"
    assert on_ranks(2, model_that_one_rank_lacks, path) == [message] * 2


def error_of_rank_1(ranks: Ranks) -> str | None:
    nothing = ranks.first_error(None)
    assert nothing is None
    return ranks.first_error("é" * 20_000 if ranks.rank == 1 else None)


def test_the_whole_of_a_long_error_reaches_every_rank() -> None:
    assert on_ranks(2, error_of_rank_1) == ["é" * 20_000] * 2
