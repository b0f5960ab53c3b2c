"""Every family in the trainer: log-probs of whole sequences, gradients, a step, and what a server makes of the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.servers.engine import EngineSampling
from agentrl.trainer.base import TrainBatch
from agentrl.trainer.config import LoraConfig, LoraTarget, TrainerConfig
from agentrl.trainer.model import Microbatch, PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.weights.model_files import model_tensors
from agentrl.weights.tensors import held_checksums, write_safetensors
from tests.support.embedded import generate, request, running
from tests.support.families import FAMILIES, HELD, family_checkpoint
from tests.trainer.helpers import full_logprobs, load_plain, random_batch

_CPU = torch.device("cpu")
_SEVEN: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TARGETS: dict[str, tuple[LoraTarget, ...]] = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": ("q_proj", "o_proj", "gate_up_proj"),
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
}
"""Adapted layers of the families that do not have the usual seven."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=HELD)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp(family) / "model", family)


def _microbatch(model: PolicyModel, batch: TrainBatch, *, entropy: bool = False) -> Microbatch:
    samples = [item.sample for item in batch.samples]
    return model.microbatch(
        [sample.token_ids for sample in samples],
        [sample.loss_mask for sample in samples],
        [sample.temperatures for sample in samples],
        entropy=entropy,
        share=model.shares_prefixes,
    )


@pytest.mark.parametrize("max_logits", [1 << 27, 2000], ids=["whole", "slices"])
def test_logprobs_and_gradients_of_a_batch_are_those_of_sequences_one_by_one(path: Path, max_logits: int) -> None:
    model, plain = PolicyModel(path, device=_CPU, max_logits=max_logits, share=True), load_plain(path)
    batch = random_batch(temperature=0.7)
    ours = model.logprobs(_microbatch(model, batch))
    slow = torch.cat(
        [full_logprobs(plain, item.sample)[torch.from_numpy(item.sample.loss_mask[1:])] for item in batch.samples]
    )
    torch.testing.assert_close(ours, slow, rtol=0, atol=1e-5)
    for values in (ours, slow):
        values.square().sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-3)


def test_entropies_are_those_of_the_modules_own_logits(path: Path) -> None:
    model, plain = PolicyModel(path, device=_CPU), load_plain(path)
    batch = random_batch(samples=3)
    with torch.no_grad():
        found = model.outputs(_microbatch(model, batch, entropy=True)).entropy
        expected: list[torch.Tensor] = []
        for item in batch.samples:
            ids = torch.from_numpy(item.sample.token_ids.astype(np.int64))[None]
            every = plain(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
            expected.append(-(every.exp() * every).sum(-1)[torch.from_numpy(item.sample.loss_mask[1:])])
    assert found is not None
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-4)


def test_recomputed_activations_give_the_same_gradients(path: Path) -> None:
    batch = random_batch(samples=3)
    gradients: list[torch.Tensor] = []
    for checkpointing in (False, True):
        model = PolicyModel(path, device=_CPU, gradient_checkpointing=checkpointing)
        model.logprobs(_microbatch(model, batch)).sum().backward()
        gradient = next(iter(model.parameters.values())).grad
        assert gradient is not None
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def test_bfloat16_is_near_float32(path: Path) -> None:
    batch = random_batch(samples=3)
    exact, near = (PolicyModel(path, device=_CPU, dtype=dtype) for dtype in ("float32", "bfloat16"))
    with torch.no_grad():
        difference = near.logprobs(_microbatch(near, batch)) - exact.logprobs(_microbatch(exact, batch))
    assert 0 < float(difference.abs().mean()) < 0.05


def _published(trainer: PolicyTrainer, path: Path, directory: Path) -> Path:
    """Write the weights of `trainer` as a publication does, and return the directory."""
    directory.mkdir()
    (directory / "config.json").write_bytes((path / "config.json").read_bytes())
    write_safetensors(directory / "model.safetensors", trainer.model.export())
    return directory


async def test_a_server_samples_with_the_weights_of_a_step_as_the_trainer_computes_them(path: Path, tmp_path: Path) -> None:
    trainer = PolicyTrainer(
        PolicyModel(path, device=_CPU), TrainerConfig(device="cpu", lr=1e-3), AlgorithmConfig(), total_steps=2
    )
    trainer.step(random_batch())
    published = _published(trainer, path, tmp_path / "1")
    async with running(path) as engine:
        before = engine.checksums()
        reply = await engine.update_weights(str(published), weight_version="1", flush_cache=False, abort_all_requests=False)
        assert reply.success, reply.message
        assert engine.checksums() == held_checksums(published / "model.safetensors", "float32")
        assert engine.checksums() != before
        prompts = [np.random.default_rng(i).integers(0, 350, 5 + 9 * i).tolist() for i in range(3)]
        sampling = EngineSampling(max_new_tokens=20, ignore_eos=True)
        results = await generate(engine, *(request(f"{i:032x}", ids, sampling) for i, ids in enumerate(prompts)))
    for result in results:
        ids = np.array([*result.request.input_ids, *result.output_ids], np.int32)
        mask = np.arange(len(ids)) >= len(result.request.input_ids)
        with torch.no_grad():
            judged = trainer.model.logprobs(trainer.model.microbatch([ids], [mask]))
        assert np.abs(judged.numpy() - result.output_logprobs).max() < 1e-5


async def test_an_adapter_is_trained_and_served_merged(family: str, path: Path, tmp_path: Path) -> None:
    targets = _TARGETS.get(family, _SEVEN)
    config = TrainerConfig(device="cpu", lr=1e-2, lora=LoraConfig(rank=4, targets=targets))
    model = PolicyModel(path, device=_CPU, lora=config.lora)
    trainer = PolicyTrainer(model, config, AlgorithmConfig(), total_steps=2)
    trainer.step(random_batch())
    published = _published(trainer, path, tmp_path / "1")
    ids = np.arange(3, 33, dtype=np.int32)
    mask = np.arange(len(ids)) > 0
    with torch.no_grad():
        judged = trainer.model.logprobs(trainer.model.microbatch([ids], [mask]))
    async with running(published) as engine:
        sampling = EngineSampling(max_new_tokens=0)
        (scored,) = await generate(engine, request("a" * 32, ids.tolist(), sampling, logprob_start_len=0))
    assert scored.input_logprobs is not None
    assert np.abs(judged.numpy() - np.array(scored.input_logprobs[1:], np.float64)).max() < 1e-5
    assert model_tensors(published).keys() <= model_tensors(path).keys()


def test_targets_that_a_family_fuses_are_named(tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path, "phi3")
    with pytest.raises(ConfigError, match=r"no linear layer q_proj; it has .*gate_up_proj.*qkv_proj"):
        PolicyModel(path, device=_CPU, lora=LoraConfig(rank=4))


def test_no_family_but_those_of_the_own_forward_pass_shares_prefixes(path: Path, family: str) -> None:
    assert PolicyModel(path, device=_CPU, share=True).shares_prefixes == FAMILIES[family].own
