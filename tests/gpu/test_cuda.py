"""Passes and steps on a GPU are those on a CPU (`make test-gpu`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from agentrl.algo.config import AlgorithmConfig
from agentrl.algo.prefixes import token_tree
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import Microbatch, PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.shared import shared_row
from agentrl.types import BoolArray, Int32Array
from tests.trainer.helpers import VOCAB, random_batch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # compilers warn of what is no fault
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose heads are as large as kernels of GPUs want them."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def forked(seed: int, count: int = 7, stem: int = 300) -> tuple[list[Int32Array], list[BoolArray]]:
    """Return sequences that fork from earlier ones at any token, and are longer than blocks of a mask."""
    random = np.random.default_rng(seed)
    grown = [random.integers(1, VOCAB, stem).astype(np.int32)]
    for _ in range(count - 1):
        parent = grown[random.integers(len(grown))]
        tail = random.integers(1, VOCAB, random.integers(1, 200)).astype(np.int32)
        grown.append(np.concatenate([parent[: random.integers(1, len(parent) + 1)], tail]))
    return grown, [(np.arange(len(one)) > 0) & (random.random(len(one)) < 0.6) for one in grown]


def results(model: PolicyModel, batch: Microbatch) -> dict[str, torch.Tensor]:
    """Return log-probs and the gradients of a sum of them, on the CPU."""
    logprobs = model.logprobs(batch)
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=logprobs.device)).sum().backward()
    found = {name: tensor.grad.cpu() for name, tensor in model.parameters.items() if tensor.grad is not None}
    model.module.zero_grad(set_to_none=True)
    return {**found, "logprobs": logprobs.detach().cpu()}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, part: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=part, atol=part * float(values.abs().max()) + 1e-6)


def test_log_probs_and_gradients_are_those_of_a_cpu(path: Path) -> None:
    ids, masks = forked(0)
    on_cpu, on_gpu = (PolicyModel(path, device=device) for device in (CPU, GPU))
    expected = results(on_cpu, on_cpu.microbatch(ids, masks))
    assert_near(results(on_gpu, on_gpu.microbatch(ids, masks)), expected, part=1e-4)


def test_bfloat16_differs_from_float32_by_its_rounding(path: Path) -> None:
    ids, masks = forked(0)
    exact, rounded = PolicyModel(path, device=CPU), PolicyModel(path, device=GPU, dtype="bfloat16")
    expected, found = exact.logprobs(exact.microbatch(ids, masks)), rounded.logprobs(rounded.microbatch(ids, masks))
    assert float((found.cpu() - expected).detach().abs().mean()) < 0.02


@pytest.mark.parametrize("one_kernel", [True, False], ids=["one kernel", "run by run"])
@pytest.mark.parametrize("recomputed", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_gives_what_its_sequences_give_side_by_side(
    path: Path, one_kernel: bool, recomputed: bool, seed: int
) -> None:
    ids, masks = forked(seed)
    plain = PolicyModel(path, device=GPU)
    model = PolicyModel(path, device=GPU, share=True, gradient_checkpointing=recomputed)
    tree = replace(model.microbatch(ids, masks, share=True), row=shared_row(token_tree(ids), GPU, one_kernel=one_kernel))
    assert_near(results(model, tree), results(plain, plain.microbatch(ids, masks)), part=1e-4)


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16}], ids=["full", "lora"])
def test_steps_are_those_of_a_cpu(path: Path, lora: dict[str, int] | None) -> None:
    metrics: list[Mapping[str, float]] = []
    for device in (CPU, GPU):
        config = TrainerConfig.model_validate({"lr": 1e-3, "minibatches": 1, "lora": lora})
        model = PolicyModel(path, device=device, share=True, lora=config.lora)
        trainer = PolicyTrainer(model, config, AlgorithmConfig(), total_steps=10, seed=5)
        reports = [trainer.step(random_batch(version=at + 1, seed=at, samples=9, stem=6)) for at in range(3)]
        metrics.append(reports[-1].metrics)
    on_cpu, on_gpu = metrics
    assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], rel=1e-3, abs=1e-4)
    assert on_gpu["grad_norm"] == pytest.approx(on_cpu["grad_norm"], rel=1e-3)
