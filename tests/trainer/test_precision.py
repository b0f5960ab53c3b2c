"""A model of one process in bfloat16, without a mesh."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agentrl.trainer.model import PolicyModel
from agentrl.trainer.precision import compute_in_bfloat16
from tests.support.tiny import Architecture, tiny_checkpoint
from tests.trainer.helpers import load_plain

_CPU = torch.device("cpu")
IDS = np.arange(1, 40, dtype=np.int32)


def logprobs(model: PolicyModel) -> Tensor:
    return model.logprobs(model.microbatch([IDS], [np.arange(len(IDS)) > 0]))


def gradients(model: PolicyModel) -> dict[str, Tensor]:
    logprobs(model).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.parameters.items() if parameter.grad is not None}


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "llama"])
def test_log_probs_are_those_of_a_bfloat16_model_to_the_last_bit(
    tmp_path: Path, arch: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.trainer.model.multiplies_bfloat16_slowly", lambda: False)
    path = tiny_checkpoint(tmp_path, arch=arch)
    model, plain = PolicyModel(path, device=_CPU, dtype="bfloat16"), load_plain(path, torch.bfloat16)
    tokens = torch.from_numpy(IDS.astype(np.int64))[None]
    with torch.no_grad():
        logits = plain(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        assert torch.equal(logprobs(model), torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0])


def test_float32_products_of_bfloat16_values_differ_by_rounding_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = gradients(PolicyModel(checkpoint, device=_CPU))
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for slow in (False, True):
        monkeypatch.setattr("agentrl.trainer.model.multiplies_bfloat16_slowly", lambda slow=slow: slow)
        model = PolicyModel(checkpoint, device=_CPU, dtype="bfloat16")
        found.append((logprobs(model).detach(), gradients(model)))
    (plain, plain_gradients), (widened, widened_gradients) = found
    torch.testing.assert_close(widened, plain, rtol=0.02, atol=0.02)
    for name, gradient in exact.items():
        # Both are off by bfloat16's rounding; the widened pass must not be off by more.
        size = gradient.norm()
        off = float((widened_gradients[name] - gradient).norm() / size)
        assert off < 1.5 * float((plain_gradients[name] - gradient).norm() / size) + 1e-3, name
        assert off > 0, f"{name} was computed in float32 throughout"


def test_a_widened_linear_layer_multiplies_in_float32_and_rounds_once() -> None:
    torch.manual_seed(0)
    layer, inputs = nn.Linear(48, 32), torch.randn(9, 48).bfloat16().requires_grad_()
    weight, bias = (tensor.detach().bfloat16().double() for tensor in (layer.weight, layer.bias))
    compute_in_bfloat16(layer, widened=True)
    output = layer(inputs)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, (inputs.double() @ weight.T + bias).float().bfloat16())
    upstream = torch.randn(9, 32).bfloat16()
    output.backward(upstream)
    assert layer.weight.grad is not None
    assert inputs.grad is not None
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        layer.weight.grad.double(), upstream.double().T @ inputs.detach().double(), rtol=2**-8, atol=1e-5
    )
    torch.testing.assert_close(inputs.grad.double(), upstream.double() @ weight, rtol=2**-8, atol=1e-5)


def test_what_is_recomputed_for_the_backward_pass_is_bfloat16_too(checkpoint: Path) -> None:
    settings = [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "max_logits": 2000}]
    found = [gradients(PolicyModel(checkpoint, device=_CPU, dtype="bfloat16", **each)) for each in settings]  # pyright: ignore[reportArgumentType]
    for name, gradient in found[0].items():
        assert gradient.dtype == torch.float32
        assert torch.equal(found[1][name], gradient), name
        # Slices of the head add the same terms in another order, which bfloat16 rounds.
        assert float((found[2][name] - gradient).norm() / gradient.norm()) < 0.02, name


def test_weights_are_float32_again_after_a_pass_that_failed() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, inputs: Tensor) -> Tensor:
            assert self.weight.dtype == torch.bfloat16
            raise ValueError("out of memory")

    block = Failing()
    masters = dict(block.named_parameters())
    compute_in_bfloat16(block)
    for _ in range(2):
        with pytest.raises(ValueError, match="out of memory"):
            block(torch.ones(2))
        assert dict(block.named_parameters()) == masters
