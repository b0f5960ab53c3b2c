"""One file describes the run; whatever is wrong with it is named, with the mend, before anything starts."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentrl.config import RunConfig, load_config, parse_config, parse_overrides
from agentrl.errors import ConfigError

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "model"}}


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, str | None]:
    """Return every leaf field with its description."""
    found: dict[str, str | None] = {}
    for name, info in model.model_fields.items():
        kinds = [k for k in (info.annotation, *getattr(info.annotation, "__args__", ())) if isinstance(k, type)]
        nested = next((k for k in kinds if issubclass(k, BaseModel)), None)
        if nested is None:
            found[prefix + name] = info.description
        else:
            found |= fields(nested, f"{prefix}{name}.")
    return found


def test_there_are_under_a_hundred_fields_and_each_is_documented() -> None:
    found = fields(RunConfig)
    assert len(found) < 100
    assert [name for name, text in found.items() if not text] == []


def test_every_field_has_a_reader() -> None:
    root = Path(__file__).parents[2]
    text = "\n".join(
        file.read_text()
        for folder in ("agentrl", "examples", "workflows")
        for file in (root / folder).rglob("*.py")
        if file.name != "config.py"
    )
    unread = [name for name in fields(RunConfig) if not re.search(rf"\.{name.split('.')[-1]}\b", text)]
    assert unread == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trainer": {"lrr": 1}}, "trainer.lrr: there is no such field; did you mean lr?"),
        ({"zzz": 1}, "zzz: there is no such field; fields here:"),
        ({"trainer": {"lr": "fast"}}, "trainer.lr: input should be a valid number"),
        ({"trainer": {"lr": -1}}, "trainer.lr: input should be greater than 0, got int -1"),
        ({"trainer": {"processes": 4}}, "trainer.processes: this release trains in one process, got 4; set it to 1"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: 0 samples greedily"),
        ({"inference": {"backend": "sglang"}}, "inference.sglang_python: expected the Python"),
        ({"inference": {"backend": "sglang", "urls": ["http://x"], "threads": 2}}, "inference.threads: the sglang backend"),
        ({"inference": {"urls": ["http://x"], "servers": 2}}, "inference.servers: applies to servers launched here"),
        ({"inference": {"host": "0.0.0.0"}}, "inference.host: 0.0.0.0 is not loopback; set inference.api_key_env"),
        ({"tasks": {}}, "tasks: expected exactly one of path and factory"),
        ({"tasks": {"path": "x", "factory": "y:z"}}, "tasks: expected exactly one of path and factory"),
        ({"tasks": {"path": "x", "factory_args": {"n": 1}}}, "tasks: factory_args and eval_factory_args need tasks.factory"),
        ({"engine": {"eval_every": 5}}, "engine.eval_every: there are no held-out tasks"),
        ({"algorithm": {"discount": 0.9}}, "algorithm.discount: only the turn advantage discounts"),
        ({"trainer": {"minibatches": 1000}}, "trainer.minibatches: 1000 is more than the 128 episodes"),
        ({"rollout": {"incomplete_group": "keep", "min_group_size": 9}}, "rollout.min_group_size: 9 is over"),
        ({"engine": {"stall_timeout_s": 60}}, "engine.stall_timeout_s: 60 s is not more than the 600 s an episode may take"),
        (
            {"trainer": {"call_timeout_s": 1000}},
            "engine.stall_timeout_s: 900 s is not more than the 1000 s a call to the trainer",
        ),
        ({"trainer": {"dtype": "bfloat16"}}, "engine.probe_tolerance: log-probs computed in bfloat16 differ by about 0.02"),
        ({"rollout": {"min_group_size": 3}}, "rollout.min_group_size: applies to incomplete_group: keep"),
        (
            {"inference": {"urls": ["http://x"], "start_timeout_s": 3}},
            "inference.start_timeout_s: applies to servers launched",
        ),
        ({"name": "../elsewhere"}, "name: string should match pattern"),
    ],
)
def test_what_is_wrong_is_named_with_the_mend(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse_config(GOOD | change)


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(GOOD | {"trainer": {"lrr": 1}, "engine": {"steps": 0}, "seed": "x"})
    assert all(name in str(error.value) for name in ("trainer.lrr", "engine.steps", "seed"))


def test_overrides_win_and_take_yaml_values() -> None:
    flags = [
        "--trainer.lr",
        "1e-5",
        "--algorithm.group-size=4",
        "--inference.urls",
        "[http://a, http://b]",
        "--rollout.max-turns",
        "null",
    ]
    run = parse_config(GOOD, flags)
    assert run.trainer.lr == 1e-5
    assert run.algorithm.group_size == 4
    assert run.inference.urls == ("http://a", "http://b")
    assert run.rollout.max_turns is None


@pytest.mark.parametrize("flags", [["trainer.lr", "1"], ["--trainer.lr"], ["--trainer.lr", "--seed"], ["--seed.deep", "1"]])
def test_a_malformed_flag_is_a_config_error(flags: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_config(GOOD | {"seed": 1}, flags)


def test_a_missing_file_and_bad_yaml_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the run file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected a mapping"):
        load_config(tmp_path / "list.yaml")


KEYS = st.sampled_from([*RunConfig.model_fields, "lr", "x", ""])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4))
def test_a_mutated_config_is_accepted_or_rejected_by_name_and_never_crashes(change: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        parse_config(GOOD | change)


@given(st.lists(st.text(max_size=12), max_size=4))
def test_any_flags_parse_or_are_config_errors(flags: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        parse_overrides(flags)
