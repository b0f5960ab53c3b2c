"""One file describes the run; each error in it is named, with the fix, before anything starts."""

from __future__ import annotations

import ast
import contextlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from agentrl.algo.config import CriticConfig, ReferenceConfig
from agentrl.config import RunConfig, load_config, parse_config, parse_overrides
from agentrl.config.base import Config
from agentrl.config.describe import field_docstrings
from agentrl.data.config import WeightedSource
from agentrl.engine.config import LOGPROB_TOLERANCE, PROBE_TOLERANCE, probe_bounds, spot_bounds
from agentrl.errors import ConfigError
from agentrl.inference.backend import LogprobTolerance
from agentrl.inference.config import InferenceConfig
from agentrl.plan.text import resolved_yaml
from agentrl.processes.config import SplitConfig
from agentrl.trainer.config import LoraConfig, ParallelConfig

GOOD: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "model"}}


def fields(model: type[BaseModel], prefix: str = "", seen: set[tuple[type, str]] | None = None) -> dict[str, str | None]:
    """Return every leaf field with its description; a field that several sections inherit is there once."""
    found: dict[str, str | None] = {}
    seen = set() if seen is None else seen
    for name, info in model.model_fields.items():
        owner = next(kind for kind in reversed(model.__mro__) if name in getattr(kind, "model_fields", {}))
        if (owner, name) in seen:
            continue
        seen.add((owner, name))
        kinds = [k for k in (info.annotation, *getattr(info.annotation, "__args__", ())) if isinstance(k, type)]
        nested = next((k for k in kinds if issubclass(k, BaseModel)), None)
        if nested is None:
            found[prefix + name] = field_docstrings(model).get(name)
        else:
            found |= fields(nested, f"{prefix}{name}.", seen)
    return found


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hunter2@10.0.0.7:30000",
        "http://hunter2@x",
        "https://:hunter2@x/v1",
        "http://a:hunter2@/",
        "//hunter2@x",
        "http://a:x/hunter2@b",
    ],
)
def test_a_password_in_a_server_url_is_refused_and_shown_nowhere(url: str) -> None:
    with pytest.raises(ConfigError, match=r"inference\.urls: .*inference\.api_key_env") as caught:
        parse_config({**GOOD, "inference": {"urls": [url]}})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValueError, match="api_key_env") as direct:
        InferenceConfig(urls=(url,))
    assert "hunter2" not in str(direct.value)


def test_there_are_at_most_149_fields_and_each_is_documented() -> None:
    found = fields(RunConfig)
    assert len(found) <= 149
    assert [name for name, text in found.items() if not text] == []


@cache
def reads() -> frozenset[tuple[str, str, str]]:
    """Return `(section, class, attribute)` of what the sources read of something called like a section, or `config`.

    `trainer.lr`, `self._trainer.lr` and `run.resolved_trainer.lr` read from the section trainer, in any module; `config.lr`
    reads from the section whose class the module names, which is in the second place. Printing a plan is no reading.
    """
    root = Path(__file__).parents[2]
    kinds = {
        base.__name__ for kind in (*sections().values(), WeightedSource) for base in kind.__mro__ if issubclass(base, Config)
    } - {"Config"}
    found: set[tuple[str, str, str]] = set()
    for folder in ("agentrl", "companions", "envs", "examples", "workflows"):
        for file in (root / folder).rglob("*.py"):
            if file.parts[-2:] == ("plan", "text.py"):
                continue
            text = file.read_text()
            named = [kind for kind in kinds if re.search(rf"\b{kind}\b", text)]
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
                    continue
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
                name = name.lstrip("_").removeprefix("resolved_")
                found.add((name, "", node.attr))
                found |= {("", kind, node.attr) for kind in named if name == "config"}
    return frozenset(found)


def sections() -> dict[str, type[BaseModel]]:
    """Return the config class of each section; the fields at the top are those of `run`."""
    found: dict[str, type[BaseModel]] = {"run": RunConfig}
    for name, info in RunConfig.model_fields.items():
        for kind in (info.annotation, *getattr(info.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[name] = kind
    return found | {
        "trainer.parallel": ParallelConfig,
        "trainer.lora": LoraConfig,
        "cluster.split": SplitConfig,
        "algorithm.critic": CriticConfig,
        "algorithm.reference": ReferenceConfig,
    }


def is_read(field: str) -> bool:
    section, _, name = field.rpartition(".")
    section = section or "run"
    read_as = {(section.rpartition(".")[2].removesuffix("s"), "", name), (section, "", name)}
    read_as |= {("", kind.__name__, name) for kind in (sections() | {"tasks.sources": WeightedSource})[section].__mro__}
    return not reads().isdisjoint(read_as)


def test_every_field_has_a_reader() -> None:
    assert [name for name in fields(RunConfig) if not is_read(name)] == []


@pytest.mark.parametrize(
    "field",
    ["algorithm.path", "rollout.seed", "sampling.device", "engine.threads", "trainer.data", "sync.steps", "sync.host"],
)
def test_a_field_without_a_reader_is_found_although_others_are_called_like_it(field: str) -> None:
    assert not is_read(field)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"trainer": {"lrr": 1}}, "trainer.lrr: there is no such field; did you mean trainer.lr?"),
        ({"zzz": 1}, "zzz: there is no such field; fields here:"),
        ({"trainer": {"lr": "fast"}}, "trainer.lr: input should be a valid number"),
        ({"trainer": {"lr": -1}}, "trainer.lr: input should be greater than 0, got int -1"),
        ({"sampling": {"temperature": 0}}, "sampling.temperature: 0 samples greedily"),
        ({"inference": {"sglang_args": ["--tp", "2"]}}, "inference.sglang_args: the embedded backend cannot honour it"),
        ({"inference": {"backend": "sglang", "sglang_args": ["--api-key", "k"]}}, "inference.sglang_args: --api-key does"),
        ({"inference": {"device": "gpu"}}, "inference.device: string should match pattern"),
        (
            {"inference": {"backend": "sglang", "urls": ["http://127.0.0.1:1"], "servers": 2}},
            "inference.servers: applies to launched servers",
        ),
        ({"inference": {"urls": ["http://x"], "servers": 2}}, "inference.servers: applies to launched servers"),
        (
            {"inference": {"urls": ["http://x:1", "http://X:1"]}},
            "inference.urls: expected each server once, got http://x:1,",
        ),
        ({"inference": {"host": "0.0.0.0"}}, "inference.host: 0.0.0.0 is not loopback; set inference.api_key_env"),
        ({"tasks": {}}, "tasks: expected exactly one of path and factory"),
        ({"tasks": {"path": "x", "factory": "y:z"}}, "tasks: expected exactly one of path and factory"),
        ({"tasks": {"path": "x", "factory_args": {"n": 1}}}, "tasks: factory_args need factory"),
        ({"engine": {"eval_every": 5}}, "engine.eval_every: there are no held-out tasks"),
        (
            {"algorithm": {"discount": 0.9}},
            "algorithm.discount: advantage episode has no option discount; remove discount, or choose one of turn",
        ),
        ({"trainer": {"minibatches": 1000}}, "trainer.minibatches: 1000 is more than the 128 episodes"),
        ({"engine": {"stall_timeout_s": 60}}, "engine.stall_timeout_s: 60 s is not more than the 600 s an episode may take"),
        (
            {"trainer": {"call_timeout_s": 1000}},
            "engine.stall_timeout_s: 900 s is not more than the 1000 s a call to the trainer",
        ),
        (
            {"trainer": {"dtype": "bfloat16"}, "engine": {"probe_tolerance": 0.01}},
            "engine.probe_tolerance: log-probs computed in bfloat16 differ by 0.05 nats and more, which 0.01 would call",
        ),
        ({"rollout": {"workers": 2}}, "rollout.workers: applies to workers; set rollout.runner: processes or ray"),
        (
            {"rollout": {"runner": "processes"}, "workflow": "<Calculator of __main__>"},
            "rollout.runner: processes: workers import the workflow by its name, and <Calculator of __main__> was given",
        ),
        (
            {"inference": {"urls": ["http://x"], "start_timeout_s": 3}},
            "inference.start_timeout_s: applies to launched servers",
        ),
        ({"name": "../elsewhere"}, "name: string should match pattern"),
        ({"trainer": {"device": "gpu"}}, "trainer.device: string should match pattern"),
        ({"sft": {"data": "d", "device": "gpu"}}, "sft.device: string should match pattern"),
        ({"trainer": {"betas": [1.5, 0.9]}}, "trainer.betas.0: input should be less than 1, got float 1.5"),
        ({"trainer": {"betas": [0.9, -0.1]}}, "trainer.betas.1: input should be greater than or equal to 0, got float -0.1"),
        ({"trainer": {"threads": 10**12}}, "trainer.threads: input should be less than or equal to 1024"),
        ({"seed": 2**31}, "seed: input should be less than or equal to 2147483647, got int 2147483648"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0, got int -1"),
        ({"sft": {"data": "d", "seed": -5}}, "sft.seed: input should be greater than or equal to 0, got int -5"),
        ({"sft": {"data": "d", "seed": 10**23}}, "sft.seed: input should be less than or equal to 2147483647"),
    ],
)
def test_what_is_wrong_is_named_with_the_fix(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse_config(GOOD | change)


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_a_number_that_is_not_finite_is_refused_in_every_section(value: str) -> None:
    numbers = [
        f"{section}.{name}"
        for section, kind in sections().items()
        for name, info in kind.model_fields.items()
        if section not in ("run", "sft") and "float" in str(info.annotation)
    ]
    assert len(numbers) > 15
    for name in numbers:
        got = f"[.{value}, 0.5]" if name == "trainer.betas" else f"{value[:-3]}.{value[-3:]}"
        with pytest.raises(ConfigError, match=rf"{name}[^:]*: input should be"):
            parse_config(GOOD, [f"--{name}={got}"])


def test_the_largest_seed_is_one_that_every_generator_takes() -> None:
    run = parse_config(GOOD, ["--seed", str(2**31 - 1), "--inference.servers", "1000"])
    last = run.seed + run.inference.servers - 1
    np.random.RandomState(last)
    np.random.default_rng(last)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(last)) == last < 2**63


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigError) as error:
        parse_config(GOOD | {"trainer": {"lrr": 1}, "engine": {"steps": 0}, "seed": "x"})
    assert all(name in str(error.value) for name in ("trainer.lrr", "engine.steps", "seed"))


@pytest.mark.parametrize(
    ("change", "flags", "expected"),
    [
        ({}, [], ("disk", "this host and its disk")),
        ({}, ["--trainer.device", "cpu"], ("disk", "this host and its disk")),
        ({"sync": "distributed"}, [], ("distributed", "sync.method is set")),
        ({"sync": {"method": "disk"}}, ["--sync", "distributed"], ("distributed", "sync.method is set")),
        ({"sync": {"bucket_mb": 8}}, [], ("disk", "this host and its disk")),
        (
            {"inference": {"urls": ["http://10.0.0.7:1"]}, "sync": {"address": "10.0.0.1"}},
            [],
            ("distributed", "http://10.0.0.7:1 is on another host"),
        ),
        (
            {"inference": {"urls": ["http://10.0.0.7:1"]}, "engine": {"publish_dir": "/shared"}},
            [],
            ("disk", "a place that every server sees"),
        ),
        (
            {"inference": {"backend": "sglang", "device": "cuda", "servers": 7}, "trainer": {"device": "cuda:7"}},
            [],
            ("distributed", "GPUs of their own"),
        ),
        (
            {"inference": {"backend": "sglang", "device": "cuda"}, "trainer": {"device": "cuda"}},
            [],
            ("disk", "trainer and servers share GPU 0"),
        ),
    ],
)
def test_weights_take_the_way_the_topology_allows(
    change: dict[str, Any], flags: list[str], expected: tuple[str, str]
) -> None:
    run = parse_config(GOOD | change, flags)
    assert run.route.method == expected[0]
    assert expected[1] in run.route.reason


def test_on_a_gpu_that_is_shared_weights_are_sent_by_gloo() -> None:
    shared = {"inference": {"backend": "sglang", "device": "cuda"}, "trainer": {"device": "cuda"}, "sync": "distributed"}
    assert parse_config(GOOD | shared).route.sync.backend == "gloo"
    apart = {**shared, "trainer": {"device": "cuda:1"}}
    assert parse_config(GOOD | apart).route.sync.backend == "auto"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sync": "files"}, "sync.method: input should be 'auto', 'disk' or 'distributed', got str 'files'"),
        ({"sync": {"method": "disk", "bucket_mb": 8}}, "sync.bucket_mb: sync.method: disk does not use it; remove it"),
        (
            {"sync": "distributed", "engine": {"publish_dir": "/shared"}},
            "engine.publish_dir: sync.method: distributed does not use it; remove it",
        ),
        (
            {"sync": {"backend": "nccl"}, "trainer": {"device": "cpu"}},
            "sync.backend: nccl joins GPUs, but trainer.device is",
        ),
        ({"sync": {"backend": "nccl"}}, "sync.backend: nccl is SGLang's; the embedded server speaks gloo"),
        (
            {
                "sync": {"backend": "nccl"},
                "inference": {"backend": "sglang", "device": "cuda"},
                "trainer": {"device": "cuda"},
            },
            "sync.backend: nccl needs GPUs of their own, trainer and servers share [0]",
        ),
        ({"sync": {"timeout_s": 600}}, "sync.timeout_s: 600 s is not less than the 600 s a call to the trainer may take"),
        (
            {"inference": {"urls": ["http://10.0.0.7:1"]}},
            "sync.address: http://10.0.0.7:1 is another host, which cannot reach 127.0.0.1; set this host's address",
        ),
        (
            {"sync": "distributed", "inference": {"urls": ["http://127.0.0.1:1", "http://10.0.0.7:1"]}},
            "sync.address: http://10.0.0.7:1 is another host",
        ),
    ],
)
def test_a_way_that_cannot_work_is_named_with_the_fix(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse_config(GOOD | change)


@pytest.mark.parametrize("method", ["auto", "disk", "distributed"])
def test_the_resolved_run_reads_back_to_the_same_way(method: str) -> None:
    run = parse_config(GOOD | {"sync": method})
    again = parse_config(yaml.safe_load(resolved_yaml(run)))
    assert again.route == run.route


def test_overrides_win_and_take_yaml_values() -> None:
    flags = [
        "--trainer.lr",
        "1e-5",
        "--algorithm.group-size=4",
        "--inference.urls",
        "[http://localhost:1, http://localhost:2]",
        "--rollout.max-turns",
        "null",
    ]
    run = parse_config(GOOD, flags)
    assert run.trainer.lr == 1e-5
    assert run.algorithm.group_size == 4
    assert run.inference.urls == ("http://localhost:1", "http://localhost:2")
    assert run.rollout.max_turns is None


def test_the_context_limit_holds_for_launched_and_for_running_servers() -> None:
    attached = ["--inference.urls", "http://127.0.0.1:1"]
    limited = ["--inference.max_context_tokens", "512"]
    assert parse_config(GOOD).inference.context_limit == 4096
    assert parse_config(GOOD, limited).inference.context_limit == 512
    assert parse_config(GOOD, attached + limited).inference.context_limit == 512
    assert parse_config(GOOD, attached).inference.context_limit is None
    assert parse_config(GOOD, ["--inference.backend", "sglang"]).inference.context_limit is None


def test_one_word_is_enough_for_a_list_of_words() -> None:
    flags = ["--inference.backend", "sglang", "--inference.urls", "http://127.0.0.1:1"]
    assert parse_config(GOOD, flags).inference.urls == ("http://127.0.0.1:1",)
    flags = ["--inference.backend", "sglang", "--inference.sglang_args=--tp 2 --mem-fraction-static=0.4"]
    assert parse_config(GOOD, flags).inference.sglang_args == ("--tp", "2", "--mem-fraction-static=0.4")


@pytest.mark.parametrize(
    ("change", "dtype", "probe", "spot"),
    [
        ({}, "float32", PROBE_TOLERANCE["float32"], LOGPROB_TOLERANCE["float32"]),
        (
            {"trainer": {"dtype": "bfloat16"}},
            "bfloat16",
            LogprobTolerance(mean=0.08, tail=0.35),
            LogprobTolerance(mean=0.08, tail=0.35),
        ),
        (
            {"inference": {"dtype": "bfloat16"}},
            "bfloat16",
            LogprobTolerance(mean=0.08, tail=0.35),
            LogprobTolerance(mean=0.08, tail=0.35),
        ),
        (
            {"trainer": {"dtype": "bfloat16"}, "inference": {"dtype": "float32"}},
            "float32",
            LogprobTolerance(mean=0.08, tail=0.35),
            LogprobTolerance(mean=0.08, tail=0.35),
        ),
        (
            {"trainer": {"dtype": "bfloat16"}, "engine": {"probe_tolerance": 0.1}},
            "bfloat16",
            LogprobTolerance(largest=0.1),
            LogprobTolerance(mean=0.08, tail=0.35),
        ),
        (
            {"engine": {"logprob_tolerance": 0.5, "max_logprob_difference": 2}},
            "float32",
            PROBE_TOLERANCE["float32"],
            LogprobTolerance(mean=0.5, largest=2),
        ),
    ],
)
def test_servers_compute_as_the_trainer_and_the_checks_tolerate_what_that_costs(
    change: dict[str, Any], dtype: str, probe: LogprobTolerance, spot: LogprobTolerance
) -> None:
    run = parse_config(GOOD | change)
    assert run.resolved_inference.dtype == dtype
    assert probe_bounds(run.engine, run.compute_type) == probe
    assert spot_bounds(run.engine, run.compute_type) == spot


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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"algorithm": {"max_staleness": 0}}, r"max_staleness: 0 trains only what the new weights sampled"),
        ({"trainer": {"snapshot": "stream"}}, r"snapshot: stream keeps no copy of the weights to send"),
    ],
)
def test_a_publication_cannot_overlap_a_step_that_needs_it_or_changes_it(changes: dict[str, Any], why: str) -> None:
    engine = {"engine": {"overlap_publication": True}}
    assert parse_config({**GOOD, **engine}).engine.overlap_publication
    with pytest.raises(ConfigError, match=rf"engine\.overlap_publication: .*{why}"):
        parse_config({**GOOD, **engine, **changes})
