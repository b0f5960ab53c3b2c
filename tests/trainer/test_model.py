"""Log-probs of a HF model at trained positions."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import ConfigError, InvariantError
from agentrl.trainer.base import TrainBatch
from agentrl.trainer.model import Microbatch, PolicyModel, resolve_device
from agentrl.trainer.parallel.snapshot import raw_tensor, torch_tensor
from agentrl.weights.tensors import write_safetensors
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import full_logprobs, load_plain, random_batch

_CPU = torch.device("cpu")


def _microbatch(model: PolicyModel, batch: TrainBatch) -> Microbatch:
    samples = [item.sample for item in batch.samples]
    return model.microbatch(
        [sample.token_ids for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.temperatures for sample in samples],
    )


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_at_trained_positions_are_those_of_the_whole_model(
    tmp_path: Path, arch: Architecture, temperature: float
) -> None:
    path = tiny_checkpoint(tmp_path, arch=arch)
    model = PolicyModel(path, device=_CPU)
    batch = random_batch(temperature=temperature)

    ours = model.logprobs(_microbatch(model, batch))

    plain = load_plain(path)
    slow = [full_logprobs(plain, item.sample)[torch.from_numpy(item.sample.loss_mask[1:])] for item in batch.samples]
    torch.testing.assert_close(ours, torch.cat(slow), rtol=0, atol=1e-5)


def test_logits_made_in_slices_give_the_same_logprobs_and_gradients(checkpoint: Path) -> None:
    batch = random_batch()
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    for max_logits in (1 << 27, 2000):
        model = PolicyModel(checkpoint, device=_CPU, max_logits=max_logits)
        logprobs = model.logprobs(_microbatch(model, batch))
        logprobs.square().sum().backward()
        gradient = model.parameters["model.embed_tokens.weight"].grad
        assert gradient is not None
        results.append((logprobs.detach(), gradient))

    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("max_logits", [1 << 27, 2000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_temperature_one_nothing_is_divided_and_every_bit_is_as_if_it_were(
    checkpoint: Path, dtype: Literal["float32", "bfloat16"], max_logits: int
) -> None:
    model = PolicyModel(checkpoint, device=_CPU, dtype=dtype, max_logits=max_logits)
    undivided = _microbatch(model, random_batch())
    assert undivided.temperatures is None
    divided = dataclasses.replace(undivided, temperatures=torch.ones(len(undivided.targets)))
    results: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
    for microbatch in (undivided, divided):
        logprobs = model.logprobs(microbatch)
        results.append((logprobs, list(torch.autograd.grad(logprobs.square().sum(), list(model.parameters.values())))))

    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("max_logits", [1 << 27, 2000])
def test_one_microbatch_can_mix_temperatures(checkpoint: Path, max_logits: int) -> None:
    batches = [random_batch(seed=seed, temperature=temperature) for seed, temperature in enumerate([1.0, 0.7, 1.3])]
    mixed = TrainBatch(samples=tuple(item for batch in batches for item in batch.samples), policy_version=3)
    model = PolicyModel(checkpoint, device=_CPU, max_logits=max_logits)

    ours = model.logprobs(_microbatch(model, mixed))

    plain = load_plain(checkpoint)
    slow = [full_logprobs(plain, item.sample)[torch.from_numpy(item.sample.loss_mask[1:])] for item in mixed.samples]
    torch.testing.assert_close(ours, torch.cat(slow), rtol=0, atol=1e-5)


def test_gradient_checkpointing_changes_memory_only(checkpoint: Path) -> None:
    batch = random_batch()
    gradients: list[torch.Tensor] = []
    for on in (False, True):
        model = PolicyModel(checkpoint, device=_CPU, gradient_checkpointing=on)
        model.logprobs(_microbatch(model, batch)).sum().backward()
        gradient = model.parameters["model.layers.0.self_attn.q_proj.weight"].grad
        assert gradient is not None
        gradients.append(gradient)

    torch.testing.assert_close(gradients[0], gradients[1])


def test_bfloat16_keeps_the_weights_in_float32(checkpoint: Path) -> None:
    model = PolicyModel(checkpoint, device=_CPU, dtype="bfloat16")
    exact = PolicyModel(checkpoint, device=_CPU)
    batch = random_batch()

    difference = (model.logprobs(_microbatch(model, batch)) - exact.logprobs(_microbatch(exact, batch))).abs()

    assert 0 < float(difference.detach().max()) < 0.5
    assert {parameter.dtype for parameter in model.parameters.values()} == {torch.float32}


def test_dropout_in_the_config_is_off_even_with_gradient_checkpointing(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    model = PolicyModel(path, device=_CPU, gradient_checkpointing=True)
    batch = _microbatch(model, random_batch())

    assert torch.equal(model.logprobs(batch), model.logprobs(batch))


def test_a_tied_output_head_is_exported_once_and_the_export_loads_again(tmp_path: Path, checkpoint: Path) -> None:
    exported = PolicyModel(checkpoint, device=_CPU).export()
    shutil.copytree(checkpoint, tmp_path / "copy")

    write_safetensors(tmp_path / "copy" / "model.safetensors", exported)

    assert "lm_head.weight" not in exported
    expected = load_file(checkpoint / "model.safetensors")
    assert {name: torch_tensor(tensor).tolist() for name, tensor in exported.items()} == {
        name: tensor.tolist() for name, tensor in expected.items()
    }
    assert load_plain(tmp_path / "copy").get_parameter("lm_head.weight").shape == (357, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_any_tensor_survives_the_way_through_bytes(dtype: torch.dtype) -> None:
    for tensor in (torch.arange(6).reshape(2, 3).to(dtype).T, torch.ones((), dtype=dtype), torch.ones(0, 2, dtype=dtype)):
        back = torch_tensor(raw_tensor(tensor))
        assert back.dtype == dtype
        assert torch.equal(back, tensor)


def test_an_id_outside_the_vocabulary_is_refused(checkpoint: Path) -> None:
    model = PolicyModel(checkpoint, device=_CPU)

    with pytest.raises(InvariantError, match="token ids from 5 to 9999; the vocabulary has 357"):
        model.microbatch([np.array([5, 9999], np.int32)], [np.array([False, True])])


def test_a_first_token_cannot_be_trained(checkpoint: Path) -> None:
    model = PolicyModel(checkpoint, device=_CPU)

    with pytest.raises(InvariantError, match="sequence 1 asks for the log-prob of its first token"):
        model.microbatch([np.ones(2, np.int32)] * 2, [np.array([False, True]), np.array([True, True])])


def test_a_directory_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a local Hugging Face model directory"):
        PolicyModel(tmp_path, device=_CPU)


def test_weights_that_do_not_fit_the_config_are_a_config_error(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}))

    with pytest.raises(ConfigError, match=r"the weights do not fit .*config\.json: missing_keys"):
        PolicyModel(path, device=_CPU)


def test_damaged_weights_are_a_config_error(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path)
    (path / "model.safetensors").write_bytes(b"not safetensors at all")

    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        PolicyModel(path, device=_CPU)


@pytest.mark.parametrize("name", ["tpu0?", "cuda:99"])
def test_a_device_that_is_not_there_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        resolve_device(name)
