"""A trainer of several ranks does what a trainer of one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import InvariantError
from agentrl.trainer.checkpoint import read_checkpoint, write_checkpoint
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shape import MeshShape
from agentrl.trainer.policy import PolicyTrainer
from agentrl.weights.tensors import RawTensor
from tests.support.ranks import on_ranks
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import load_plain, random_batch

_IDS = [np.arange(1, 30, dtype=np.int32), np.arange(5, 9, dtype=np.int32), np.array([1], np.int32)]
_TEMPERATURES = [0.7, 1.0, 1.0]
# Where sequences are cut, gradients are summed in another order. AdamW divides by their size, so in its first steps a weight
# whose gradient is rounding noise moves by the learning rate in a random direction.
_SMALL_STEPS = {"lr": 5e-5, "microbatch_tokens": 64}


class Outcome(NamedTuple):
    """What some steps left behind on one rank."""

    metrics: dict[str, float]
    logprobs: list[NDArray[np.float32]]
    weights: dict[str, NDArray[np.float32]]
    proximal: dict[int, NDArray[np.float32]]


def make_trainer(ranks: Ranks, path: Path, settings: dict[str, Any]) -> PolicyTrainer:
    config = TrainerConfig.model_validate({"lr": 1e-3, "max_grad_norm": 0.5, **settings})
    model = PolicyModel(
        path,
        device=torch.device("cpu"),
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        ranks=ranks,
    )
    return PolicyTrainer(model, config, AlgorithmConfig(), total_steps=10, seed=5)


def three_steps(ranks: Ranks, path: Path, settings: dict[str, Any]) -> Outcome:
    trainer = make_trainer(ranks, path, settings)
    reports = [trainer.step(random_batch(version=number + 1, seed=number, samples=9)) for number in range(3)]
    timeless = {name: value for name, value in reports[-1].metrics.items() if not name.startswith("seconds")}
    proximal = dict(reports[-1].proximal_logprobs)
    return Outcome(timeless, trainer.logprobs(_IDS), _arrays(trainer.model.export()), proximal)


def _arrays(tensors: dict[str, RawTensor]) -> dict[str, NDArray[np.float32]]:
    return {name: np.frombuffer(raw.data, np.float32).copy() for name, raw in tensors.items()}


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

    together = on_ranks(mesh, three_steps, path, settings)

    for outcome in together:  # every rank knows the metrics and the log-probs
        # A maximum is that of one token, whose rounding does not average out.
        maxima = {name for name in alone.metrics if name.endswith("_max")}
        for name, value in alone.metrics.items():
            assert outcome.metrics[name] == pytest.approx(value, rel=1e-5 if name in maxima else 1e-6, abs=1e-6), name
        for ours, theirs in zip(outcome.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=5e-7, atol=2e-6)  # rtol: float32 itself rounds
        assert outcome.proximal.keys() == alone.proximal.keys()
        for at, values in alone.proximal.items():
            np.testing.assert_allclose(outcome.proximal[at], values, rtol=0, atol=1e-5)
    assert together[0].weights.keys() == alone.weights.keys()
    for name, values in alone.weights.items():
        np.testing.assert_allclose(together[0].weights[name], values, rtol=0, atol=1e-6, err_msg=name)
    assert all(outcome.weights == {} for outcome in together[1:])


def saved_and_continued(ranks: Ranks, path: Path, folder: Path, settings: dict[str, Any]) -> float:
    trainer = make_trainer(ranks, path, settings)
    trainer.step(random_batch(version=1, samples=9))
    weights, optimizer = trainer.model.export(), trainer.optimizer_tensors()
    assert bool(optimizer) == (ranks.rank == 0)
    if ranks.rank == 0:
        write_checkpoint(folder, weights=weights, optimizer=optimizer, state=trainer.state, source=path)
    return trainer.step(random_batch(version=2, seed=1, samples=9)).metrics["loss"]


def restored(ranks: Ranks, path: Path, folder: Path, settings: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    trainer = make_trainer(ranks, path, settings)
    trainer.restore(read_checkpoint(folder))
    state = {**_bytes(trainer.model.export()), **_bytes(trainer.optimizer_tensors())}
    return trainer.step(random_batch(version=2, seed=1, samples=9)).metrics["loss"], state


def _bytes(tensors: dict[str, RawTensor]) -> dict[str, bytes]:
    return {name: bytes(raw.data) for name, raw in tensors.items()}


@pytest.mark.external
def test_a_checkpoint_of_two_ranks_continues_on_one_and_on_three(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    settings = {"microbatch_tokens": 64}
    [expected, _] = on_ranks(2, saved_and_continued, path, tmp_path / "saved", settings)

    [again, _] = on_ranks(2, restored, path, tmp_path / "saved", settings)
    alone = restored(Ranks(), path, tmp_path / "saved", settings)
    [three, *_] = on_ranks(3, restored, path, tmp_path / "saved", settings)

    assert again[0] == expected  # exact under the ranks it was written with
    assert alone[0] == pytest.approx(expected, rel=1e-5)
    assert three[0] == pytest.approx(expected, rel=1e-5)
    written = again[1]
    assert alone[1] == written  # the state itself is the same bytes
    assert three[1] == written


def bfloat16_logprobs(ranks: Ranks, path: Path) -> list[NDArray[np.float32]]:
    trainer = make_trainer(ranks, path, {"dtype": "bfloat16"})
    return [
        trainer.logprobs([ids], [at])[0] for ids, at in zip(_IDS, _TEMPERATURES, strict=True)
    ]  # one by one: padding changes how bfloat16 is rounded


@pytest.mark.parametrize("world", [1, 2, pytest.param(MeshShape(cp=2), marks=pytest.mark.external)])
def test_bfloat16_log_probs_are_those_of_a_bfloat16_model(tmp_path: Path, world: int | MeshShape) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    plain = load_plain(path, torch.bfloat16)
    expected: list[NDArray[np.float32]] = []
    for ids, temperature in zip(_IDS, _TEMPERATURES, strict=True):
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


def error_of_rank_1(ranks: Ranks) -> str | None:
    nothing = ranks.first_error(None)
    assert nothing is None
    return ranks.first_error("é" * 20_000 if ranks.rank == 1 else None)


def test_the_whole_of_a_long_error_reaches_every_rank() -> None:
    assert on_ranks(2, error_of_rank_1) == ["é" * 20_000] * 2
