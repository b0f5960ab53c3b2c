"""The plan on models of every family, whose sizes it takes from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config import parse_config
from agentrl.plan.model import read_model
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan
from tests.support.families import FAMILIES

_SIZES = {"vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 32}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "pad_token_id": None}


def _write(path: Path, name: str) -> int:
    """Write the config.json of a model of the family; return its number of parameters."""
    family = FAMILIES[name]
    with torch.device("meta"):
        config = AutoConfig.for_model(family.model_type, **_SIZES, **_HEADS, **family.fields)
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def _run(path: Path, **sections: Any) -> Any:  # noqa: ANN401 - sections of a run file
    given = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": str(path)}, **sections}
    return plan_run(parse_config(given))


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_those_of_transformers_or_unknown(name: str, tmp_path: Path) -> None:
    expected = _write(tmp_path, name)
    facts = read_model(str(tmp_path))
    assert facts.own_forward == FAMILIES[name].own
    assert facts.refusal is None
    if FAMILIES[name].recurrent:
        assert facts.shape is None
        assert "unknown for this qwen3_5_text model" in describe_plan(_run(tmp_path))
    else:
        assert facts.shape is not None
        assert facts.shape.num_parameters == expected


def test_capped_attention_is_named_where_its_memory_is_not_counted(tmp_path: Path) -> None:
    _write(tmp_path, "gemma2")
    assert "without the scores of attention, which are capped" in describe_plan(_run(tmp_path))


def test_targets_that_a_family_fuses_and_adapters_beside_weights_are_refused_with_the_fix(tmp_path: Path) -> None:
    _write(tmp_path, "phi3")
    plan = _run(tmp_path, trainer={"lora": {"rank": 4}}, sync={"adapter": "adapter"})
    assert list(plan.problems) == [
        "trainer.lora.targets: the layers of a phi3 model have no q_proj, k_proj, v_proj, gate_proj, up_proj; choose among "
        "o_proj, down_proj, qkv_proj, gate_up_proj",
        "sync.adapter: the embedded server computes a phi3 model with transformers' module, which takes no adapter "
        "beside the weights; set sync.adapter: merged, or inference.backend: sglang",
    ]
    targets = {"rank": 4, "targets": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
    assert _run(tmp_path, trainer={"lora": targets}, sync={"adapter": "merged"}).problems == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "is an encoder with a decoder"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"a": 1}, "vision_config": {"b": 1}},
            r"\(Gemma3ForConditionalGeneration\) takes images or sound .*; use the checkpoint of a text model",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
            r"\(MixtralForCausalLM\) is a mixture of 8 experts",
        ),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    [problem] = _run(tmp_path).problems
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)
