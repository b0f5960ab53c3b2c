"""Passes that share prefixes give the log-probs, gradients and steps of sequences computed one by one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algo.prefixes import token_tree
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.shared import shared_attention, shared_row
from agentrl.types import BoolArray, Int32Array
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import VOCAB, random_batch
from tests.trainer.parallel.steps import make_trainer

_CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicyModel]:
    arch: Architecture = request.param
    path = tiny_checkpoint(tmp_path_factory.mktemp(arch), arch=arch, spread=0.1)
    return {
        "plain": PolicyModel(path, device=_CPU),
        "shared": PolicyModel(path, device=_CPU, share=True),
        "recomputed": PolicyModel(path, device=_CPU, share=True, gradient_checkpointing=True, max_logits=2000),
    }


def random_tree(seed: int, count: int) -> list[tuple[Int32Array, BoolArray]]:
    """Return sequences that fork from earlier ones at any token, and the tokens that are wanted."""
    random = np.random.default_rng(seed)
    grown: list[Int32Array] = [random.integers(1, VOCAB, 20).astype(np.int32)]
    for _ in range(count - 1):
        stem = grown[random.integers(len(grown))]
        tail = random.integers(1, VOCAB, random.integers(0, 15)).astype(np.int32)
        grown.append(np.concatenate([stem[: random.integers(1, len(stem) + 1)], tail]))
    return [(one, (np.arange(len(one)) > 0) & (random.random(len(one)) < 0.6)) for one in grown]


def computed(model: PolicyModel, trees: list[tuple[Int32Array, BoolArray]], *, share: bool) -> dict[str, torch.Tensor]:
    ids, masks = zip(*trees, strict=True)
    batch = model.microbatch(ids, masks, share=share, entropy=True)
    outputs = model.outputs(batch)
    assert outputs.logprobs is not None
    assert outputs.entropy is not None
    weights = torch.linspace(-1, 1, len(outputs.logprobs))
    ((outputs.logprobs + 0.1 * outputs.entropy) * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in model.parameters.items() if parameter.grad is not None}
    model.module.zero_grad(set_to_none=True)
    return {**found, "logprobs": outputs.logprobs.detach(), "entropy": outputs.entropy.detach()}


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 9))
def test_values_and_gradients_are_those_of_sequences_side_by_side(
    models: dict[str, PolicyModel], seed: int, count: int
) -> None:
    trees = random_tree(seed, count)
    if not any(mask.any() for _, mask in trees):
        return
    expected = computed(models["plain"], trees, share=False)
    for name in ("shared", "recomputed"):
        found = computed(models[name], trees, share=True)
        assert found.keys() == expected.keys()
        for part, values in expected.items():
            # rtol: float32 rounds log-probs of 6 nats to 5e-7
            near = 1e-5 * float(values.abs().max()) + 1e-6 if part not in ("logprobs", "entropy") else 1e-6
            torch.testing.assert_close(found[part], values, rtol=1e-6, atol=near, msg=lambda text, at=part: f"{at}: {text}")


def test_a_step_with_common_prefixes_is_the_step_without(checkpoint: Path) -> None:
    settings_of = {"lr": 3e-5, "microbatch_tokens": 200}
    batch = random_batch(version=1, samples=9, stem=6)
    reports, logprobs = [], []
    for setting in ("off", "auto"):
        trainer = make_trainer(Ranks(), checkpoint, {**settings_of, "shared_prefixes": setting})
        reports.append(trainer.step(batch).metrics)
        logprobs.append(trainer.logprobs([item.sample.token_ids for item in batch.samples]))
    off, auto = reports
    assert auto["shared_tokens"] > 0 == off["shared_tokens"]
    assert auto["computed_tokens"] + auto["shared_tokens"] == off["computed_tokens"]
    assert auto["loss"] == pytest.approx(off["loss"], rel=1e-5)
    assert auto["grad_norm"] == pytest.approx(off["grad_norm"], rel=1e-5)
    for ours, theirs in zip(*logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)


def test_a_model_with_windows_computes_sequences_side_by_side(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", arch="qwen2")
    config = json.loads((path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": None}
    (path / "config.json").write_text(json.dumps(config))
    assert not PolicyModel(path, device=_CPU, share=True).shares_prefixes


def test_a_model_whose_keys_and_values_differ_in_size_computes_sequences_side_by_side(tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = AutoConfig.for_model("youtu", vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **shape, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = PolicyModel(tmp_path, device=_CPU, share=True)
    assert not model.shares_prefixes
    assert computed(model, random_tree(0, 3), share=False)["logprobs"].isfinite().all()


def test_what_attention_keeps_for_the_gradient_grows_with_tokens_and_not_with_their_square() -> None:
    common, own = np.zeros(3000, np.int32), np.arange(1, 1001, dtype=np.int32)
    tree = token_tree([np.concatenate([common, own + number * 1000]) for number in range(3)])
    row = shared_row(tree, torch.device("cpu"), one_kernel=False)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    query, key, value = (torch.randn(1, 2, len(tree.token_ids), 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        shared_attention(torch.nn.Identity(), query, key, value, None, shared_row=row)
    assert sum(kept.values()) < 20 * query.nbytes
