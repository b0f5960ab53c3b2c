"""Settings of adapters that cannot work are named before anything starts, and SGLang is launched for what they need."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.errors import ConfigError
from agentrl.inference.config import flag_value

BASE: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}
ADAPTER: dict[str, Any] = {"trainer": {"lora": {"rank": 8}}, "sync": {"adapter": "adapter"}}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sync": {"adapter": "adapter"}}, r"sync\.adapter: adapter needs one; set trainer\.lora"),
        ({"trainer": {"lora": {}, "trainable": "norm"}}, r"trainer\.trainable: trainer\.lora trains its adapter only"),
        ({"trainer": {"trainable": "["}}, r"trainer\.trainable.*expected a regular expression, got '\[': unterminated"),
        ({**ADAPTER, "sync": {"adapter": "adapter", "method": "distributed"}}, r"is loaded from files; remove sync\.method"),
        ({**ADAPTER, "inference": {"pause_mode": "fast"}}, r"inference\.pause_mode: fast keeps KV"),
        ({"inference": {"pause_mode": "pinned"}}, r"inference\.pause_mode: pinned needs servers that hold two versions"),
        ({"trainer": {"lora": {}}, "inference": {"pause_mode": "pinned"}}, r"sync\.adapter: adapter with trainer\.lora"),
        (
            {**ADAPTER, "inference": {"urls": ["http://10.0.0.7:1"]}},
            r"10\.0\.0\.7.* may not see this disk; set engine\.publish",
        ),
        ({"trainer": {"lora": {"targets": ["lm_head"]}}}, "q_proj"),
        ({"trainer": {"lora": {"targets": []}}}, "targets"),
        ({"trainer": {"lora": {"rank": 0}}}, r"trainer\.lora\.rank"),
    ],
)
def test_what_cannot_work_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(BASE | values)


def test_a_launched_sglang_takes_as_many_adapters_as_the_staleness_bound_needs() -> None:
    run = parse_config(BASE | ADAPTER | {"inference": {"backend": "sglang"}, "algorithm": {"max_staleness": 3}})
    arguments = run.resolved_inference.sglang_args
    assert "--enable-lora" in arguments
    assert [flag_value(arguments, flag) for flag in ("--max-lora-rank", "--max-loaded-loras", "--max-loras-per-batch")] == [
        "8", "5", "5",
    ]  # fmt: skip
    assert arguments[arguments.index("--lora-target-modules") + 1 :][:2] == ("q_proj", "k_proj")


@pytest.mark.parametrize(
    ("values", "mode", "lag"),
    [
        ({}, "exact", 0),
        ({"inference": {"pause_mode": "fast"}}, "fast", 0),
        (ADAPTER, "pinned", 4),
        ({**ADAPTER, "inference": {"pause_mode": "pinned"}}, "pinned", 4),
        ({**ADAPTER, "inference": {"pause_mode": "exact"}}, "exact", 0),
    ],
)
def test_running_calls_keep_their_adapter_within_the_staleness_bound(values: dict[str, Any], mode: str, lag: int) -> None:
    run = parse_config(BASE | {"algorithm": {"max_staleness": 4}} | values)
    assert run.resolved_inference.pause_mode == mode
    assert run.max_adapter_lag == lag


def test_merged_weights_need_nothing_of_a_server() -> None:
    run = parse_config(BASE | {"trainer": {"lora": {}}, "inference": {"backend": "sglang"}})
    assert run.resolved_inference.sglang_args == ()
