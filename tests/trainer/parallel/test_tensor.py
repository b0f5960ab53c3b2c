"""Tensor parallel ranks compute what one process computes, and their common weights stay equal on all of them."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from agentrl.errors import ConfigError, InvariantError
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks, make_mesh
from agentrl.trainer.parallel.shape import MeshShape
from agentrl.types import Float32Array
from agentrl.weights.model_files import model_tensors
from tests.support.ranks import on_ranks
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import random_batch
from tests.trainer.parallel.steps import IDS, assert_same, make_trainer, three_steps

pytestmark = pytest.mark.starts


# A small lr: AdamW moves an element of almost no gradient by a share of lr that rounding decides.
@pytest.mark.parametrize(
    ("mesh", "arch", "settings"),
    [
        (MeshShape(tp=2), "qwen3", {"microbatch_tokens": 100}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                (MeshShape(dp=2, tp=2), "qwen3", {"minibatches": 4, "microbatch_tokens": 64}),
                (MeshShape(tp=2), "qwen3", {"microbatch_tokens": 100, "stem": 6, "gradient_checkpointing": True}),
                (MeshShape(dp=2, tp=2), "qwen2", {"minibatches": 3, "gradient_checkpointing": True}),
                (MeshShape(dp=3, tp=2), "llama", {"weight_decay": 0.1, "microbatch_tokens": 100}),
                (MeshShape(replicate=2, tp=2), "llama", {"minibatches": 2, "microbatch_tokens": 64}),
                (
                    MeshShape(cp=2, tp=2),
                    "llama",
                    {"microbatch_tokens": 64, "gradient_checkpointing": True},
                ),
            ]
        ),
    ],
    ids=str,
)
def test_split_matrices_give_the_weights_and_metrics_of_one_process(
    tmp_path: Path, mesh: MeshShape, arch: Architecture, settings: dict[str, Any]
) -> None:
    path = tiny_checkpoint(tmp_path / "model", arch=arch, spread=0.1)
    alone = three_steps(Ranks(), path, {"lr": 3e-5, **settings})

    assert_same(on_ranks(mesh, three_steps, path, {"lr": 3e-5, **settings}), alone)


def reloaded(ranks: Ranks, path: Path, other: Path) -> dict[str, bytes]:
    model = PolicyModel(path, device=torch.device("cpu"), ranks=ranks)
    model.read(model_tensors(other), other)
    return {name: bytes(raw.data) for name, raw in model.export().items()}


@pytest.mark.long
def test_whole_tensors_enter_and_leave_parts_of_unequal_size(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")  # 357 tokens, which neither 2 nor 3 divides
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    expected = reloaded(Ranks(), path, other)

    found, *empty = on_ranks(MeshShape(dp=3, tp=2), reloaded, path, other)

    assert found == expected
    assert empty == [{}] * 5


def bfloat16_logprobs(ranks: Ranks, path: Path) -> list[Float32Array]:
    return make_trainer(ranks, path, {"dtype": "bfloat16"}).logprobs(IDS)


@pytest.mark.long
def test_bfloat16_log_probs_are_near_those_of_one_process(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", spread=0.1)
    [alone] = on_ranks(1, bfloat16_logprobs, path)

    for found in on_ranks(MeshShape(tp=2), bfloat16_logprobs, path):
        for ours, theirs in zip(found, alone, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=0.02)  # partial sums are rounded before they are added


def error_after_a_drift(ranks: Ranks, path: Path) -> tuple[str, str]:
    trainer = make_trainer(ranks, path, {})
    trainer.step(random_batch(version=1, samples=5))
    if ranks.rank == 1:
        norm = trainer.model.parameters["model.layers.1.self_attn.k_norm.weight"]
        with torch.no_grad():
            norm.mul_(1 + 1e-6)
    try:
        trainer.step(random_batch(version=2, seed=1, samples=5))
    except InvariantError as error:
        return "", str(error)
    return "no error", ""


@pytest.mark.parametrize("mesh", [MeshShape(tp=2), pytest.param(MeshShape(dp=2, tp=2), marks=pytest.mark.long)], ids=str)
def test_weights_that_drift_apart_are_an_error_on_every_rank(tmp_path: Path, mesh: MeshShape) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    for missing, message in on_ranks(mesh, error_after_a_drift, path):
        assert not missing
        assert message.startswith("trainer.parallel.tp: the weights that tensor parallel ranks hold in common differ")


def error_of_loading(ranks: Ranks, path: Path) -> str:
    try:
        PolicyModel(path, device=torch.device("cpu"), ranks=ranks)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.long
def test_heads_that_cannot_be_dealt_are_an_error_on_every_rank(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")  # two key-value heads
    for message in on_ranks(MeshShape(tp=4), error_of_loading, path):
        assert message == "trainer.parallel.tp: 4 does not divide the model's 2 key-value heads; use 1 or 2"


def error_of_an_exchange_without_its_peer(ranks: Ranks) -> tuple[str, float]:
    shape = MeshShape(dp=2, tp=2)
    mesh = make_mesh(shape, ranks.rank, torch.device("cpu"), timedelta(seconds=5))
    assert mesh.tp is not None
    ranks.gather(b"all are here")
    message, began = "", time.monotonic()
    if ranks.rank != 1:  # which is stopped
        try:
            dist.all_reduce(torch.zeros(1), group=mesh.tp.get_group())
        except RuntimeError as error:
            message = str(error)
    waited = time.monotonic() - began
    ranks.gather(b"all have given up")
    return message, waited


@pytest.mark.long
def test_an_exchange_of_tensor_parallel_ranks_has_the_trainers_timeout() -> None:
    found = on_ranks(MeshShape(dp=2, tp=2), error_of_an_exchange_without_its_peer)
    assert "imed out" in found[0][0]
    assert found[0][1] < 50  # not the 60 s of the ranks themselves
    assert [message for message, _ in found[1:]] == ["", "", ""]
