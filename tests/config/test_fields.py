"""Each field in the list has a meaning, a type and a default."""

from __future__ import annotations

import pytest

from agentrl.config import RunConfig, parse_config
from agentrl.config.describe import ConfigField, as_yaml, config_fields, field_values

BASE = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}
FIELDS = {field.path: field for field in config_fields(RunConfig)}


def test_every_field_has_a_meaning_and_a_type_in_words() -> None:
    lacking = [f.path for f in FIELDS.values() if not f.meaning or not f.type or "<" in f.type or "typing" in f.type]
    assert lacking == []


def test_the_fields_are_those_that_a_run_has() -> None:
    optional = {
        "sft": {"data": "d.jsonl"},
        "trainer": {"lora": {}},
        "cluster": {"split": "auto"},
        "algorithm": {"advantage": "turn_gae", "critic": {}, "reference": {}, "terms": [{"kl": 0.1}]},
    }
    run = parse_config({**BASE, **optional, "tasks": {"path": "t.jsonl", "eval": {"path": "e.jsonl"}}})
    assert [path for path, _, _ in field_values(run)] == [f.path for f in FIELDS.values() if not f.is_section]


@pytest.mark.parametrize(
    ("path", "kind", "unit", "default"),
    [
        ("trainer.lr", "number above 0", None, "1.0e-06"),
        ("rollout.episode_timeout_s", "number above 0", "seconds", "600.0"),
        ("rollout.max_turns", "integer at least 1 or none", None, "null"),
        ("algorithm.staleness_policy", "one of wait, mask, drop", None, "wait"),
        ("trainer.betas", "2 values, each number at least 0, below 1", None, "[0.9, 0.95]"),
        ("inference.urls", "list of text", None, "[]"),
        (
            "tasks.sources",
            "list of sections with path, format, unreadable, factory, factory_args, map, filter, limit, weight",
            None,
            "[]",
        ),
        ("engine.logprob_tolerance", "number above 0 or none", "nats", "null"),
        ("workflow", "text", None, None),
        ("model", "section", None, None),
        ("sft", "section", None, "null"),
    ],
)
def test_a_field_is_described_in_words(path: str, kind: str, unit: str | None, default: str | None) -> None:
    field = FIELDS[path]
    assert (field.type, field.unit, field.default) == (kind, unit, default)


def test_a_default_is_yaml_that_the_field_takes() -> None:
    defaults = {f.path: f.default for f in FIELDS.values() if f.default is not None and not f.is_section}
    excluding = {"tasks.path", "tasks.eval.path", "tasks.eval.factory"}  # of other fields
    defaults = {path: default for path, default in defaults.items() if path not in excluding}
    # The critic and the reference have defaults too.
    defaults |= {"algorithm.advantage": "turn_gae", "algorithm.terms": "[{kl: {weight: 0.1}}]"}
    run = parse_config(
        BASE, ["--sft.data=d", "--tasks.eval.path=e", *(f"--{path}={default}" for path, default in defaults.items())]
    )
    assert {path: text for path, text, _ in field_values(run) if path in defaults} == defaults


def test_values_that_a_file_gives_are_told_from_defaults() -> None:
    given = [path for path, _, given in field_values(parse_config({**BASE, "trainer": {"lr": 1e-5}})) if given]
    assert given == ["workflow", "tasks.path", "model.path", "trainer.lr"]


def test_a_section_comes_before_its_fields() -> None:
    assert FIELDS["trainer"].is_section
    assert not FIELDS["trainer.lr"].is_section
    names = list(FIELDS)
    assert names.index("trainer") == names.index("trainer.device") - 1
    lr: ConfigField = FIELDS["trainer.lr"]
    assert (lr.section, lr.name) == ("trainer", "lr")
    assert as_yaml(("a", 1)) == "[a, 1]"
