"""The estimates of memory agree with what transformers builds and autograd saves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from agentrl.algo.config import AlgorithmConfig
from agentrl.config import parse_config
from agentrl.plan.disk_space import disk_problems
from agentrl.plan.memory import GIB, RunMemory, TrainerMemory, run_memory, trained_parameters
from agentrl.plan.model import ModelShape, read_model
from agentrl.plan.places import shared_gpus
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan
from agentrl.trainer.config import LoraConfig, TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.precision import compute_in_bfloat16
from agentrl.weights.tensors import WEIGHTS_FILE, read_safetensors, write_safetensors
from tests.trainer.helpers import random_batch

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "/models/Qwen3-4B"}}


def memory_of(values: dict[str, Any], free: int | None = None, *, on_cpu: bool = False) -> RunMemory:
    run = parse_config(GOOD | values)
    return run_memory(run, shape_in(run.model.path), free, trains_on_cpu=on_cpu, sends=run.route.method == "distributed")


def shape_in(path: str | Path) -> ModelShape:
    shape = read_model(str(path)).shape
    assert shape is not None
    return shape


def built(config: Qwen2Config | Qwen3Config) -> PreTrainedModel:
    return cast("PreTrainedModel", AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


@pytest.mark.parametrize(
    "name", ["Qwen3-0.6B", "Qwen3-1.7B-Base", "qwen3-4b-instruct-2507", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"]
)
def test_the_parameters_of_a_published_model_are_those_transformers_builds(name: str) -> None:
    shape = shape_in(f"/nowhere/{name}")
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        assert shape.num_parameters == built(config).num_parameters()


@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_the_shape_comes_from_config_json_where_there_is_one(
    tmp_path: Path, kind: type[Qwen2Config] | type[Qwen3Config]
) -> None:
    config = kind(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config.save_pretrained(tmp_path)
    shape = shape_in(tmp_path)
    assert shape.num_parameters == built(config).num_parameters()


@pytest.mark.parametrize("content", ['{"num_experts": 8, "num_attention_heads": 4}', '{"model_type": "mamba"}', "{"])
def test_a_model_that_is_no_dense_decoder_has_no_estimate(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert read_model(str(tmp_path)).shape is None
    assert plan_run(parse_config(GOOD | {"model": {"path": str(tmp_path)}})).memory is None


@pytest.mark.parametrize("name", ["Qwen3-33B", "Qwen3-4B.old", "Llama-3", "model"])
def test_a_path_that_names_no_known_model_has_no_estimate(name: str) -> None:
    assert read_model(f"/nowhere/{name}").shape is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_what_autograd_saves(tmp_path: Path, dtype: str, checkpointing: bool) -> None:
    estimated: list[int] = []
    measured: list[int] = []
    for layers in (2, 6):  # embeddings and the last norm save something too, which the difference leaves out
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        config.save_pretrained(tmp_path)
        shape = shape_in(tmp_path)
        measured.append(saved_bytes(built(config), tokens=512, dtype=dtype, checkpointing=checkpointing))
        estimated.append(shape.saved_bytes(dtype, checkpointing=checkpointing) * 512)
    assert estimated[1] - estimated[0] == pytest.approx(measured[1] - measured[0], rel=0.005)


def saved_bytes(model: PreTrainedModel, *, tokens: int, dtype: str, checkpointing: bool) -> int:
    """Return the bytes of the tensors one forward pass saves for the backward pass, weights and their casts aside."""
    model.train(checkpointing)
    if checkpointing:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tuple(tensor.shape) not in shapes:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    if dtype == "bfloat16":
        compute_in_bfloat16(model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros((1, tokens), dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize(
    ("name", "experts", "width", "billions"), [("Qwen3-30B-A3B", 128, 768, 30.5), ("qwen3-235b-a22b", 128, 1536, 235.1)]
)
def test_the_parameters_of_a_mixture_of_experts_are_those_transformers_builds(
    name: str, experts: int, width: int, billions: float
) -> None:
    shape = shape_in(f"/nowhere/{name}")
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        num_experts=experts,
        num_experts_per_tok=8,
        moe_intermediate_size=width,
    )
    with torch.device("meta"):
        module = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))
    assert shape.num_parameters == module.num_parameters()
    assert shape.num_parameters == pytest.approx(billions * 1e9, rel=2e-3)


def test_a_mixture_of_experts_has_its_shape_in_config_json(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(num_hidden_layers=2, num_experts=4, hidden_size=64, moe_intermediate_size=32)
    config.save_pretrained(tmp_path)
    shape = shape_in(tmp_path)
    assert (shape.experts, shape.experts_per_token, shape.intermediate) == (4, config.num_experts_per_tok, 32)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | {"mlp_only_layers": [0]}))
    assert read_model(str(tmp_path)).shape is None  # its layers differ


@given(dp=st.sampled_from([1, 2, 8]), cp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4, 8]))
def test_each_axis_divides_what_it_splits(dp: int, cp: int, tp: int) -> None:
    settings = {"dtype": "bfloat16", "gradient_checkpointing": True, "microbatch_tokens": 32768}

    def memory(**axes: int) -> TrainerMemory:
        return memory_of({"model": {"path": "Qwen3-32B"}, "trainer": {**settings, "parallel": axes}}).trainer

    one, split, copied = memory(), memory(dp=dp, cp=cp, tp=tp), memory(dp=dp, cp=cp, tp=tp, replicate=2)
    assert split == copied  # each copy of the weights takes the same again
    for states in ("weights", "gradients", "optimizer"):
        assert getattr(split, states) * dp * cp * tp == pytest.approx(getattr(one, states), rel=1e-6)
    assert (split.copies * tp, split.reduced * tp) == pytest.approx((one.copies, one.reduced))
    assert one.activations / (cp * tp) <= split.activations * 1.000001 <= one.activations / cp * 1.000002
    assert split.logits <= one.logits / tp


@pytest.mark.parametrize(
    ("trainer", "inference", "expected"),
    [
        ("cuda", {"device": "cuda"}, (0,)),
        ("cuda:1", {"device": "cuda", "servers": 2}, (1,)),
        ("cuda:7", {"device": "cuda", "servers": 7}, ()),
        ("cuda:3", {"device": "cuda", "servers": 2, "sglang_args": ["--tp", "2"]}, (3,)),
        ("cpu", {"device": "cuda"}, ()),
        ("cuda", {"device": "cpu"}, ()),
        ("cuda", {"urls": ["http://127.0.0.1:1"]}, ()),
    ],
)
def test_a_gpu_that_trainer_and_server_would_both_use_is_found(
    trainer: str, inference: dict[str, object], expected: tuple[int, ...]
) -> None:
    given = {"trainer": {"device": trainer}, "inference": {"backend": "sglang", **inference}}
    assert shared_gpus(parse_config(GOOD | given)) == expected


def test_a_checkpoint_s_copy_is_as_large_as_what_a_trainer_stages(checkpoint: Path) -> None:
    trainer = PolicyTrainer(
        PolicyModel(checkpoint, device=torch.device("cpu")), TrainerConfig(), AlgorithmConfig(), total_steps=9
    )
    trainer.step(random_batch())
    parts = trainer.stage()
    staged = sum(len(part.data.data) for tensors in (parts.weights, parts.optimizer) for part in tensors.values())

    counted = memory_of({"model": {"path": str(checkpoint)}}).checkpoint

    assert counted == pytest.approx(staged, rel=0.05)  # random states and step counters come on top


_SENT: dict[str, Any] = {"sync": {"method": "distributed"}, "inference": {"dtype": "bfloat16", "backend": "sglang"}}


@pytest.mark.parametrize(
    ("given", "free_gib", "expected"),
    [
        (_SENT, 23, "7.5 GiB of bfloat16, twice while a server still takes the version before; trainer.snapshot auto takes "
         "host, with 23.0 GiB free for it here"),
        (_SENT, 22, "host memory of rank 0 for published weights: none, where a copy takes 7.5 GiB of bfloat16; "
         "trainer.snapshot auto takes stream, with 22.0 GiB free for it here: steps wait until weights have left"),
        (_SENT | {"trainer": {"parallel": {"dp": 2}, "snapshot": "stream"}}, 99, "host memory of rank 0 for published "
         "weights: none; trainer.snapshot is stream: 7.5 GiB of bfloat16 in a file of TMPDIR"),
        ({"sync": {"method": "disk"}}, 99, "15.0 GiB of float32 until they are written; trainer.snapshot auto takes host"),
        (_SENT, None, "7.5 GiB of bfloat16; trainer.snapshot auto: rank 0 decides by the memory"),
    ],
)  # fmt: skip
def test_the_plan_names_the_host_memory_of_published_weights_and_whether_a_copy_stays(
    given: dict[str, Any], free_gib: int | None, expected: str
) -> None:
    memory = memory_of(given, None if free_gib is None else free_gib * GIB)
    assert expected in memory.snapshot.row(parse_config(GOOD | given).trainer)


def test_a_snapshot_that_is_asked_for_and_does_not_fit_is_an_error_of_the_plan() -> None:
    asked, auto = TrainerConfig(snapshot="host"), TrainerConfig()
    assert memory_of(_SENT, 15 * GIB).snapshot.problems(asked) == []
    assert memory_of(_SENT, 14 * GIB).snapshot.problems(asked) == [
        "trainer.snapshot: host takes 15.0 GiB of host memory on rank 0, and 14.0 GiB are free for it; set stream or auto"
    ]
    assert memory_of(_SENT, 1).snapshot.problems(auto) == []


def test_a_trainer_on_the_cpu_leaves_less_memory_for_published_weights() -> None:
    taken = 12 * shape_in(GOOD["model"]["path"]).num_parameters
    assert memory_of({}, 99 * GIB).snapshot.free == 99 * GIB
    assert memory_of({}, 99 * GIB, on_cpu=True).snapshot.free == 99 * GIB - taken
    assert memory_of({}, GIB, on_cpu=True).snapshot.free == 0
    assert memory_of({}, None, on_cpu=True).snapshot.free is None
    assert memory_of({"cluster": {"launcher": "attach"}}, 99 * GIB).snapshot.free is None


def test_an_adapter_s_gradients_moments_and_checkpoint_are_its_own(checkpoint: Path) -> None:
    settings = {"rank": 4, "targets": ["q_proj", "down_proj"]}
    model = PolicyModel(checkpoint, device=torch.device("cpu"), lora=LoraConfig.model_validate(settings))
    adapter = sum(tensor.numel() for tensor in model.trained.values())

    found = memory_of({"model": {"path": str(checkpoint)}, "trainer": {"lora": settings}})

    assert (found.trainer.gradients, found.trainer.optimizer) == (4 * adapter, 8 * adapter)
    assert found.trainer.weights == 4 * (sum(tensor.numel() for tensor in model.parameters.values()) + adapter)
    assert found.checkpoint == 12 * adapter


def test_a_base_in_bfloat16_takes_half_the_memory() -> None:
    trainer = {"dtype": "bfloat16", "lora": {"rank": 16}}
    found = memory_of({"model": {"path": "Qwen3-4B"}, "trainer": trainer}).trainer
    assert (found.weights + found.gradients + found.optimizer) / GIB == pytest.approx(8.0, abs=0.1)


def test_a_rank_above_the_size_of_a_layer_is_a_problem_of_the_plan(checkpoint: Path) -> None:
    plan = plan_run(parse_config(GOOD | {"model": {"path": str(checkpoint)}, "trainer": {"lora": {"rank": 17}}}))
    assert "trainer.lora.rank: 17 is above the size of k_proj, [16, 32]" in " ".join(plan.problems)


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_pattern_that_no_weight_on_the_disk_matches_is_a_problem_of_the_plan(
    checkpoint: Path, tmp_path: Path, prefix: str
) -> None:
    def problems(path: Path, trainable: str) -> tuple[str, ...]:
        return plan_run(parse_config(GOOD | {"model": {"path": str(path)}, "trainer": {"trainable": trainable}})).problems

    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    stored = read_safetensors(model / WEIGHTS_FILE)
    write_safetensors(tmp_path / WEIGHTS_FILE, {prefix + name.removeprefix("model."): raw for name, raw in stored.items()})
    (tmp_path / WEIGHTS_FILE).replace(model / WEIGHTS_FILE)
    assert problems(model, r"^model\.layers\.0\.mlp") == ()
    [problem] = problems(model, "nothing_matches")
    assert problem.startswith(f"trainer.trainable: 'nothing_matches' matches no weight of {model}; it has such as ")
    (model / WEIGHTS_FILE).unlink()
    assert problems(model, "nothing_matches") == ()


def test_a_server_holds_the_adapters_of_the_staleness_bound() -> None:
    lora = {"trainer": {"dtype": "bfloat16", "lora": {"rank": 16}}, "algorithm": {"max_staleness": 3}}
    run = parse_config(GOOD | lora | {"sync": {"adapter": "adapter"}})
    plan = plan_run(run)
    assert plan.memory is not None
    count = trained_parameters(run.trainer, shape_in(GOOD["model"]["path"]))
    assert plan.memory.server.adapters == 5 * 2 * count
    assert plan.memory.snapshot.num_bytes == 4 * count
    said = describe_plan(plan)
    assert "of at most 5 adapters" in said
    assert f"the adapter alone, {4 * count / 2**20:.1f} MiB" in said
    assert "keep their adapter for 3 updates" in said


def test_a_disk_without_room_for_what_stays_on_it_is_named(tmp_path: Path) -> None:
    lora = {"trainer": {"lora": {"rank": 16}}, "sync": {"adapter": "adapter"}, "runs_dir": str(tmp_path)}
    run = parse_config(GOOD | lora | {"engine": {"publish_dir": "/shared/adapters"}})
    memory = memory_of(lora)
    needed = 3 * memory.snapshot.num_bytes
    assert disk_problems(run, memory, run.route, lambda _: 3 * memory.checkpoint) == []
    [published] = disk_problems(run, memory, run.route, lambda at: needed - 1 if str(at) == "/shared/adapters" else 2 * GIB)
    assert published.startswith("engine.publish_dir: 3 published versions of ")
    assert "free in /shared/adapters; free space" in published
    [saved] = disk_problems(run, memory, run.route, lambda _: 3 * memory.checkpoint - 1)
    assert "runs_dir: 3 checkpoints of" in saved
    assert disk_problems(run, memory, run.route) == []
