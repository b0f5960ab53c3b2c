"""The plan says what a run will do, and its YAML reads back to the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.client import Client
from agentrl.commands.train import load_parts
from agentrl.config import parse_config
from agentrl.errors import ConfigError
from agentrl.plan.checks import missing_here, reward_warnings
from agentrl.plan.places import missing_gpus
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan, resolved_yaml
from agentrl.types import Task

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "model"}}


async def solve(task: Task, client: Client) -> float:
    return 1.0


def make() -> list[Task]:
    raise AssertionError("a plan calls no factory")


HERE = GOOD | {"workflow": f"{__name__}:solve", "tasks": {"factory": f"{__name__}:make"}}
"""A run of which everything but the model is here."""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "at most 2 version(s) behind for every trained token; wait"),
        (["--algorithm.max_staleness", "0"], "0: synchronous"),
        (["--algorithm.staleness_policy", "drop"], "drop: groups with older tokens are counted and dropped"),
        (
            ["--algorithm.advantage", "turn", "--algorithm.discount", "0.9"],
            "turn: G - mean of the other episodes' G at this depth, discount 0.9",
        ),
        (["--inference.urls", "[http://a:1]", "--inference.backend", "sglang", "--sync", "disk"], "server(s): http://a:1"),
        (["--inference.pause_mode", "fast"], "keeps stale KV"),
        (["--algorithm.behavior_weight_mode", "clamp"], "mean over tokens of [(min(w, 5.0)) * -min(r A, "),
        (["--trainer.device", "cuda:1"], "on cuda:1"),
        ([], "2 optimizer step(s) a batch"),
        ([], "[(w, 0 above 5.0) * -min(r A, clip(r, 1 - 0.2, 1 + 0.2) A)]; 2 optimizer step(s)"),
        (["--trainer.minibatches", "1"], "1 minibatch: r is always 1 and clipping never acts"),
        (["--inference.backend", "sglang", "--inference.device", "cpu"], "1 SGLang, launched on 127.0.0.1, on the CPU"),
        (
            ["--inference.backend", "sglang", "--inference.device", "cuda:2", "--inference.sglang_args=--tp 2"],
            "on GPU 2, 3, 2 each, as many requests as fit of up to the model's positions, float32",
        ),
        (
            ["--rollout.runner", "processes", "--rollout.workers", "3"],
            "64 at once, in 3 worker(s) (processes)",
        ),
        (["--trainer.dtype", "bfloat16"], "probe within 0.08 nats on average and 0.35 nats at the 99th percentile"),
        (["--model.path", "/models/Qwen3-8B"], "AdamW 61.0, float32"),
        ([], "1 embedded, launched on 127.0.0.1, device auto, 64 requests of 4096 tokens"),
        (["--inference.backend", "sglang", "--inference.device", "cpu"], "on the CPU, 64 requests of up to the model's"),
    ],
)
def test_the_plan_names_the_choice(flags: list[str], expected: str) -> None:
    assert expected in describe_plan(plan_run(parse_config(GOOD, flags)))


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("live", "every 5 steps, 128 episodes, beside training, which changes the weights meanwhile"),
        ("frozen", "every 5 steps, 128 episodes, of one version: the next one waits for their end"),
    ],
)
def test_the_plan_says_whether_an_evaluation_holds_one_version(weights: str, expected: str) -> None:
    tasks = {"path": "tasks.jsonl", "eval": {"path": "held-out.jsonl"}}
    run = parse_config(GOOD | {"tasks": tasks, "engine": {"eval_every": 5, "eval_weights": weights}})
    assert expected in describe_plan(plan_run(run))


@pytest.mark.parametrize("flags", [[], ["--seed", "3", "--trainer.betas", "[0.9, 0.99]"]])
def test_the_resolved_yaml_reads_back_to_the_same_run(flags: list[str]) -> None:
    run = parse_config(GOOD, flags)
    assert parse_config(yaml.safe_load(resolved_yaml(run))) == run


def test_the_plan_says_what_this_machine_lacks_and_demands_none_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_SGLANG_PYTHON", "/nowhere/python")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ["--trainer.device", "cuda", "--inference.device", "cuda:1", "--inference.backend", "sglang"]
    assert missing_here(plan_run(parse_config(HERE, flags))) == [
        "model.path: there is no directory model; put a HF checkpoint there, or name a model of the hub "
        "(hf://org/name) after `agentrl download hf://org/name`",
        "trainer.device: cuda, and there is no GPU",
        "inference.device: cuda:1, and there is no GPU",
        "$AGENTRL_SGLANG_PYTHON: /nowhere/python is not an executable; expected the Python of SGLang's environment",
    ]
    (tmp_path / "model").mkdir()
    assert missing_here(plan_run(parse_config(HERE))) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"workflow": "no_such_module:Agent"}, "workflow: there is no module 'no_such_module'; looked in "),
        ({"workflow": f"{__name__}:nothing"}, f"workflow: module {__name__} has no 'nothing'; it has solve"),
        ({"tasks": {"factory": "no_such_module:make"}}, "tasks.factory: there is no module 'no_such_module'"),
        ({"tasks": {"factory": f"{__name__}:none"}}, f"tasks.factory: module {__name__} has no 'none'"),
        ({"tasks": {"path": "no.jsonl"}}, "tasks.path: cannot read no.jsonl: there is no such file"),
        (
            {"tasks": {"path": "good.jsonl", "eval": {"path": "bad.jsonl"}}},
            "tasks.eval.path: bad.jsonl:1: expected a JSON object",
        ),
    ],
)
def test_the_plan_lists_what_cannot_be_imported_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "good.jsonl").write_text('{"q": 1}\n')
    (tmp_path / "bad.jsonl").write_text("oops\n")
    [line] = missing_here(plan_run(parse_config(HERE | change)))
    assert line.startswith(expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trainer.device", "cuda:1"], []),
        (["--trainer.device", "cuda:2"], ["trainer.device: cuda:2, and this machine has 2 GPU(s), counted from 0"]),
        (["--trainer.device", "auto"], []),
        (
            ["--inference.backend", "sglang", "--inference.device", "cuda:1", "--inference.servers", "2"],
            ["inference.device: cuda:1 for GPU 1 to 2, and this machine has 2 GPU(s), counted from 0"],
        ),
        (["--inference.backend", "sglang", "--inference.device", "cuda", "--inference.sglang_args=--tp 2"], []),
    ],
)
def test_the_plan_counts_the_gpus_a_run_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for device in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / device).touch()
    assert missing_gpus(parse_config(GOOD, flags), root=tmp_path) == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert missing_gpus(parse_config(GOOD, flags), root=tmp_path) == expected


def test_a_gpu_that_is_not_here_is_an_error_before_anything_is_loaded_or_started() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device: cuda:99, and .*; set it to auto or cpu"):
        load_parts(plan_run(parse_config(HERE, ["--trainer.device", "cuda:99"])))


async def solve_by_turns(task: Task, client: Client) -> float:
    completion = await client.chat.completions.create(messages=[])
    client.reward(completion, 0.5)
    return 1.0


def test_rewards_of_turns_that_the_estimator_would_spread_are_warned_about() -> None:
    by_turns = HERE | {"workflow": f"{__name__}:solve_by_turns"}
    assert len(reward_warnings(parse_config(by_turns, []))) == 1
    assert reward_warnings(parse_config(by_turns, ["--algorithm.advantage", "turn"])) == []
    assert reward_warnings(parse_config(HERE, [])) == []
    assert reward_warnings(parse_config(GOOD, [])) == []


@pytest.mark.parametrize(
    ("model", "config", "experts"),
    [
        ("mixed", {"model_type": "mixtral", "num_local_experts": 8}, 8),
        ("mixed", {"text_config": {"model_type": "deepseek_v3", "n_routed_experts": 256}}, 256),
    ],
)
def test_a_mixture_of_experts_is_refused_with_what_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, config: dict[str, Any], experts: int
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / model).mkdir()
    (tmp_path / model / "config.json").write_text(json.dumps(config))
    plan = plan_run(parse_config(HERE | {"model": {"path": model}}))
    [line] = plan.problems
    assert f"is a mixture of {experts} experts" in line
    assert line.endswith("use one of these, or a dense model, such as Qwen3, Llama, Mistral or Gemma")
    with pytest.raises(ConfigError, match=f"is a mixture of {experts} experts"):
        load_parts(plan)


@pytest.mark.parametrize(
    ("rotations", "limit", "bound"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, None, 4096),
        ({"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 2048}, 2049, 2048),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 512}}, 512, None),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 512}}, None, None),
    ],
)
def test_rotations_by_the_longest_sequence_of_a_pass_are_refused_beyond_their_bound(
    tmp_path: Path, rotations: dict[str, Any], limit: int | None, bound: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", **rotations}))
    run = HERE | {"model": {"path": str(tmp_path)}, "inference": {"backend": "sglang", "max_context_tokens": limit}}
    problems = plan_run(parse_config(run)).problems
    assert len(problems) == (bound is not None)
    for problem in problems:
        assert problem.endswith(f"set inference.max_context_tokens to at most {bound}")


@pytest.mark.parametrize(
    ("config", "flags", "reason"),
    [
        ({"model_type": "phi3"}, [], "only llama, qwen2, qwen3 models share, and this is phi3"),
        ({"model_type": "qwen2", "sliding_window": 8}, [], "layers attend within a window"),
        ({"model_type": "qwen3"}, ["--trainer.parallel.cp", "2"], "trainer.parallel.cp splits sequences"),
        ({"model_type": "qwen3"}, [], None),
        ({"model_type": "phi3"}, ["--trainer.shared_prefixes", "off"], None),
    ],
)
def test_the_plan_says_why_samples_share_no_prefixes(
    tmp_path: Path, config: dict[str, Any], flags: list[str], reason: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = describe_plan(plan_run(parse_config(HERE | {"model": {"path": str(tmp_path)}}, flags)))
    row = f"prefixes    trainer.shared_prefixes: auto changes nothing here, because {reason}"
    assert (row in text.splitlines()) == (reason is not None)
    assert ("prefixes  " in text) == (reason is not None)


@pytest.mark.parametrize("config", [{"model_type": "qwen3"}, {"num_experts": 1}, {"num_experts": None}])
def test_a_dense_model_is_not_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan_run(parse_config(HERE | {"model": {"path": str(tmp_path)}})).problems == ()
