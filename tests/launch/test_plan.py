"""The plan says what a run will do, and its YAML reads back to the same run."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from agentrl.config import parse_config
from agentrl.launch.plan import describe_plan, resolved_yaml

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "model"}}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "at most 2 version(s) behind for every trained token; wait"),
        (["--algorithm.max_staleness", "0"], "0: synchronous"),
        (["--algorithm.staleness_policy", "drop"], "drop: groups with older tokens are dropped"),
        (["--algorithm.advantage", "turn", "--algorithm.discount", "0.9"], "turn: return-to-go of each turn (discount 0.9)"),
        (["--inference.urls", "[http://a:1]", "--inference.backend", "sglang"], "1 running sglang server(s): http://a:1"),
        (["--inference.pause_mode", "in_place"], "keeps stale KV"),
        (["--algorithm.behavior_weight_mode", "clamp"], "behavior weight always applied, clamp above 5"),
        (["--trainer.device", "cuda:1"], "on cuda:1"),
    ],
)
def test_the_plan_names_the_choice(flags: list[str], expected: str) -> None:
    assert expected in describe_plan(parse_config(GOOD, flags))


@pytest.mark.parametrize("flags", [[], ["--seed", "3", "--trainer.betas", "[0.9, 0.99]", "--inference.threads", "2"]])
def test_the_resolved_yaml_reads_back_to_the_same_run(flags: list[str]) -> None:
    run = parse_config(GOOD, flags)
    assert parse_config(yaml.safe_load(resolved_yaml(run))) == run
