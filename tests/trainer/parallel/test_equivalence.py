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
from agentrl.trainer.parallel.shard import whole
from tests.support.families import family_checkpoint
from tests.support.ranks import on_ranks
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import load_plain
from tests.trainer.parallel.steps import IDS, assert_same, make_trainer, three_steps_each

_TEMPERATURES = [0.7, 1.0, 1.0]
# Ranks sum gradients in another order. AdamW divides by their size, so in its first steps a weight whose gradient is
# rounding noise moves by the learning rate in a random direction. More optimizer steps and cut sequences have more of it.
_SMALL_STEPS = {"lr": 5e-5, "microbatch_tokens": 64}


# Nine passes of one sample each: one rank has a filler, which a dense term would train a second time.
_DENSE = {
    "lr": 5e-5,
    "microbatch_tokens": 1,
    "epochs": 2,
    "algorithm": {"policy_loss": "gspo", "terms": [{"entropy": 0.1}], "aggregate": "turn", "guard": "effective_samples"},
}

_Case = tuple[Architecture, dict[str, Any]]
_UNTIED: Architecture = "llama"


@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        (
            MeshShape(dp=2),
            [
                ("qwen3", _SMALL_STEPS),
                ("qwen3", _DENSE),
                ("qwen3", {**_SMALL_STEPS, "stem": 6}),
                (_UNTIED, {"lr": 1e-4, "minibatches": 3, "microbatch_tokens": 100, "gradient_checkpointing": True}),
            ],
        ),
        (MeshShape(cp=2), [("qwen3", _SMALL_STEPS)]),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                (
                    MeshShape(dp=2),
                    [
                        ("qwen2", {"lr": 5e-5, "minibatches": 2, "weight_decay": 0.1}),
                        (_UNTIED, {"lr": 5e-5, "minibatches": 4, "max_grad_norm": 1e9}),
                    ],
                ),
                (
                    MeshShape(dp=4),
                    [
                        ("qwen3", {"gradient_checkpointing": True}),
                        ("qwen3", {"minibatches": 2, "weight_decay": 0.1, "microbatch_tokens": 4096}),
                        ("qwen2", {"lr": 5e-5, "minibatches": 3, "gradient_checkpointing": True}),
                        (_UNTIED, {"lr": 5e-5, "minibatches": 4, "microbatch_tokens": 64}),
                    ],
                ),
                (MeshShape(dp=2, cp=2), [("qwen3", {**_SMALL_STEPS, "minibatches": 3, "gradient_checkpointing": True})]),
                (MeshShape(cp=4), [("qwen3", {**_SMALL_STEPS, "minibatches": 2})]),
                (MeshShape(dp=2, replicate=2), [("qwen3", {"minibatches": 2, "microbatch_tokens": 64})]),
            ]
        ),
    ],
    ids=str,
)
def test_weights_and_metrics_are_those_of_one_process(tmp_path: Path, mesh: MeshShape, cases: list[_Case]) -> None:
    runs = [(tiny_checkpoint(tmp_path / str(number), arch=arch), more) for number, (arch, more) in enumerate(cases)]
    alone = three_steps_each(Ranks(), runs)
    together = on_ranks(mesh, three_steps_each, runs)

    for number in range(len(runs)):
        assert_same([outcomes[number] for outcomes in together], alone[number])
        assert alone[number].metrics["grad_norm"] > 0.5, "max_grad_norm does nothing"


@pytest.mark.parametrize("mesh", [MeshShape(dp=2), pytest.param(MeshShape(dp=2, cp=2), marks=pytest.mark.long)], ids=str)
def test_a_mixture_of_experts_is_trained_as_in_one_process(tmp_path: Path, mesh: MeshShape) -> None:
    runs = [(family_checkpoint(tmp_path / "model", "qwen3_moe"), {**_SMALL_STEPS, "gradient_checkpointing": True})]
    [alone] = three_steps_each(Ranks(), runs)
    assert_same([outcomes[0] for outcomes in on_ranks(mesh, three_steps_each, runs)], alone)


@pytest.fixture
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Let a process of its own multiply as the processes of a mesh do, on any CPU."""
    monkeypatch.setattr("agentrl.trainer.model.multiplies_bfloat16_slowly", lambda: False)


def bfloat16_logprobs(ranks: Ranks, path: Path) -> list[NDArray[np.float32]]:
    trainer = make_trainer(ranks, path, {"dtype": "bfloat16"})
    return [
        trainer.logprobs([ids], [at])[0] for ids, at in zip(IDS, _TEMPERATURES, strict=True)
    ]  # one by one: padding changes how bfloat16 is rounded


@pytest.mark.usefixtures("_bfloat16_products")
@pytest.mark.parametrize("world", [None, 1, 2, pytest.param(MeshShape(cp=2), marks=pytest.mark.long)])
def test_bfloat16_log_probs_are_those_of_a_bfloat16_model(tmp_path: Path, world: int | MeshShape | None) -> None:
    """With or without a mesh, which None stands for."""
    path = tiny_checkpoint(tmp_path / "model")
    plain = load_plain(path, torch.bfloat16)
    expected: list[NDArray[np.float32]] = []
    for ids, temperature in zip(IDS, _TEMPERATURES, strict=True):
        tokens = torch.tensor(ids.astype(np.int64))[None]
        with torch.no_grad():
            logits = plain(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        chosen = torch.log_softmax(logits / temperature, -1).gather(1, tokens[0, 1:, None])[:, 0]
        expected.append(chosen.numpy())

    for found in [bfloat16_logprobs(Ranks(), path)] if world is None else on_ranks(world, bfloat16_logprobs, path):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


def bfloat16_gradients(ranks: Ranks, path: Path) -> dict[str, NDArray[np.float32]]:
    """Return the gradient of two sequences, each in a pass of its own, which several data ranks share."""
    model = PolicyModel(path, device=torch.device("cpu"), dtype="bfloat16", ranks=ranks)
    for number, ids in enumerate(IDS[:2]):
        if number % ranks.data_world == ranks.data_rank:
            values = model.logprobs(model.microbatch([ids], [np.arange(len(ids)) > 0]))
            (values.sum() * ranks.averaged).backward()
    assert {parameter.dtype for parameter in model.parameters.values()} == {torch.float32}
    gradients = {name: whole(p.grad) for name, p in model.parameters.items() if p.grad is not None}
    return {name: gradient.numpy().copy() for name, gradient in gradients.items()}


@pytest.mark.long
@pytest.mark.usefixtures("_bfloat16_products")
def test_bfloat16_gradients_are_added_up_in_float32(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model")
    alone = bfloat16_gradients(Ranks(), path)

    for found in [*on_ranks(1, bfloat16_gradients, path), *on_ranks(2, bfloat16_gradients, path)]:
        assert found.keys() == alone.keys()
        for name, values in alone.items():
            assert values.dtype == np.float32
            if name == "model.embed_tokens.weight":
                # Tied to the head: FSDP adds the gradients of both uses in bfloat16, a process of its own in float32.
                np.testing.assert_allclose(found[name], values, rtol=0.02, atol=0.02)
            else:
                np.testing.assert_array_equal(found[name], values, err_msg=name)


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
