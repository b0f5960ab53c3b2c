"""The plan says what a run will do, and its YAML reads back to the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config import parse_config
from agentrl.launch.plan import describe_plan, missing_here, resolved_yaml

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "model"}}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "at most 2 version(s) behind for every trained token; wait"),
        (["--algorithm.max_staleness", "0"], "0: synchronous"),
        (["--algorithm.staleness_policy", "drop"], "drop: groups with older tokens are dropped"),
        (["--algorithm.advantage", "turn", "--algorithm.discount", "0.9"], "turn: return-to-go of each turn (discount 0.9)"),
        (["--inference.urls", "[http://a:1]", "--inference.backend", "sglang", "--sync", "disk"], "server(s): http://a:1"),
        (["--inference.pause_mode", "fast"], "keeps stale KV"),
        (["--algorithm.behavior_weight_mode", "clamp"], "behavior weight always applied, clamp above 5"),
        (["--trainer.device", "cuda:1"], "on cuda:1"),
        (["--inference.backend", "sglang", "--inference.device", "cpu"], "1 SGLang, launched on 127.0.0.1, on the CPU"),
        (
            ["--inference.backend", "sglang", "--inference.device", "cuda:2", "--inference.sglang_args=--tp 2"],
            "on GPU 2, 3, 2 each, as many requests as fit of up to the model's positions, float32",
        ),
        (["--trainer.dtype", "bfloat16"], "probe within 0.25 nats"),
        (["--model.path", "/models/Qwen3-8B"], "AdamW 61.0, float32"),
    ],
)
def test_the_plan_names_the_choice(flags: list[str], expected: str) -> None:
    assert expected in describe_plan(parse_config(GOOD, flags))


@pytest.mark.parametrize("flags", [[], ["--seed", "3", "--trainer.betas", "[0.9, 0.99]", "--inference.threads", "2"]])
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
    assert missing_here(parse_config(GOOD, flags)) == [
        "model.path: there is no directory model",
        "trainer.device: cuda, and there is no GPU",
        "inference.device: cuda:1, and there is no GPU",
        "$AGENTRL_SGLANG_PYTHON: /nowhere/python is not an executable; expected the Python of SGLang's environment",
    ]
    (tmp_path / "model").mkdir()
    assert missing_here(parse_config(GOOD)) == []
