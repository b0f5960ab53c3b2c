"""A server in bfloat16 keeps the default tolerances however deep its model is; one with a stale layer does not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.engine.config import LOGPROB_TOLERANCE, PROBE_TOLERANCE
from agentrl.inference.backend import LogprobTolerance
from agentrl.types import Float32Array

LAYERS = 30
COARSE = [PROBE_TOLERANCE["bfloat16"], LOGPROB_TOLERANCE["bfloat16"]]


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", num_hidden_layers=LAYERS, vocab_size=512, initializer_range=0.1, **shape)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.inference_mode()
def scores(policy: torch.nn.Module, ids: torch.Tensor) -> Float32Array:
    table = torch.log_softmax(policy(ids[None]).logits[0].float(), -1)[:-1]
    return table.gather(1, ids[1:, None])[:, 0].numpy()


@pytest.fixture(scope="module")
def right() -> torch.nn.Module:
    return model(0)


@pytest.fixture(scope="module")
def ids(right: torch.nn.Module) -> torch.Tensor:
    return right.generate(torch.tensor([[5]]), max_new_tokens=199, min_new_tokens=199, do_sample=True)[0]  # pyright: ignore[reportCallIssue, reportIndexIssue, reportUnknownVariableType]


@pytest.mark.parametrize("length", [2, 16, 60, 200])
@pytest.mark.parametrize("tolerance", COARSE)
def test_rounding_of_thirty_layers_keeps_the_defaults(
    tolerance: LogprobTolerance, length: int, right: torch.nn.Module, ids: torch.Tensor
) -> None:
    rounded = model(0).to(torch.bfloat16)
    differences = np.abs(scores(rounded, ids[:length]) - scores(right, ids[:length]))
    assert tolerance.excess(differences) is None
    assert differences.max() > 1e-3  # what the default of float32 would call wrong


@pytest.mark.parametrize("layer", [0, 15, 29])
@pytest.mark.parametrize("tolerance", COARSE)
def test_a_stale_layer_is_over_the_defaults(
    tolerance: LogprobTolerance, layer: int, right: torch.nn.Module, ids: torch.Tensor
) -> None:
    stale = model(0)
    layers, others = stale.get_submodule("model.layers"), model(1).get_submodule("model.layers")
    layers.get_submodule(str(layer)).load_state_dict(others.get_submodule(str(layer)).state_dict())
    differences = np.abs(scores(stale.to(torch.bfloat16), ids) - scores(right, ids))
    assert tolerance.excess(differences) is not None


def test_what_the_run_file_sets_bounds_single_tokens_or_the_mean_alone() -> None:
    differences = np.array([0.3, *[0.0] * 99], np.float32)
    assert LogprobTolerance(largest=0.3 + 1e-6).excess(differences) is None
    assert LogprobTolerance(largest=0.29).excess(differences) == "0.3 nats at most, over 0.29"
    assert LogprobTolerance(mean=0.003).excess(differences) is None
    assert LogprobTolerance(mean=0.002).excess(differences) == (
        "0.003 nats on average, over 0.0028 (tolerance 0.002, for 100 tokens)"
    )
    assert LogprobTolerance(mean=9, tail=9, largest=9).excess(np.array([np.nan], np.float32)) is not None
