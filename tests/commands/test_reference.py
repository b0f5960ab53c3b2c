"""`agentrl explain` describes a field; `agentrl config` lists the fields and their values."""

from __future__ import annotations

import subprocess

import pytest

from agentrl.algo.presets import SHORT, SHORT_CORRECTION
from agentrl.commands.explain import describe_fields, explain_name
from agentrl.config import RunConfig, parse_config
from agentrl.config.describe import config_fields
from agentrl.errors import ConfigError
from agentrl.observe.metric_keys import METRIC_KEYS
from tests.support.cli import AGENTRL, status_here

BASE = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}


def test_a_short_field_is_explained_and_guessed_like_the_others() -> None:
    for name in ("preset", *SHORT, *SHORT_CORRECTION):
        assert explain_name(f"algorithm.{name}").startswith(f"algorithm.{name}\n")
        assert f"algorithm.{name}" in explain_name("algorithm")
    for wrong, meant in (("clip_lo", "clip_low"), ("preste", "preset")):
        with pytest.raises(ConfigError, match=rf"did you mean algorithm\.{meant}"):
            parse_config(BASE, [f"--algorithm.{wrong}", "1"])


def test_a_misspelled_field_of_the_trainer_is_no_metric_of_another_trainer() -> None:
    with pytest.raises(ConfigError, match=r"did you mean trainer\.shared_prefixes"):
        explain_name("trainer.shared_prefix")
    assert "a trainer of one's own" in explain_name("trainer.entropy_of_mine")


def test_the_text_of_a_metric_has_its_subject() -> None:
    assert "    tokens of the batch's branches that ran through the model\n" in explain_name("trainer.computed_tokens")
    assert not [key for key in METRIC_KEYS if key.meaning.startswith(("of these", "of those", "the same"))]


def test_a_field_is_explained_with_type_unit_default_and_flag() -> None:
    text = explain_name("rollout.episode_timeout_s")
    assert text.splitlines()[0] == "rollout.episode_timeout_s"
    assert "Deadline of one episode" in text
    for row in (
        "type     number above 0",
        "unit     seconds",
        "default  600.0",
        "flag     --rollout.episode_timeout_s 600.0",
    ):
        assert row in text


def test_the_last_part_of_a_field_is_enough() -> None:
    assert [line for line in explain_name("lr").splitlines() if not line.startswith(" ") and line] == [
        "algorithm.critic.lr",
        "trainer.lr",
        "sft.lr",
    ]
    assert explain_name("--trainer.microbatch-tokens") == explain_name("trainer.microbatch_tokens")


def test_a_section_is_explained_by_its_fields() -> None:
    text = explain_name("sync")
    assert all(f"\nsync.{name} " in text for name in ("method", "bucket_mb", "backend", "address", "timeout_s"))


def test_a_metric_is_explained_with_its_event_and_unit() -> None:
    text = explain_name("wall_s")
    assert text.startswith("wall_s: a key of metrics.jsonl, in every line")
    assert "unit     seconds" in text
    assert "forks.REASON" in explain_name("forks.history_edited")


def test_a_word_of_another_framework_leads_to_the_field() -> None:
    with pytest.raises(ConfigError, match=r"learning_rate: there is no such field or metric; did you mean trainer\.lr\?"):
        explain_name("learning_rate")


def test_every_field_is_listed_and_can_be_explained() -> None:
    listed = [line.split()[0] for line in describe_fields().splitlines() if line]
    paths = [field.path for field in config_fields(RunConfig) if not field.is_section]
    assert listed[: len(paths)] == paths
    for path in paths:
        assert explain_name(path).splitlines()[0] == path


def test_a_run_lists_what_it_gives_and_on_demand_all() -> None:
    run = parse_config(BASE, ["--trainer.lr", "1e-5"])
    given, every = describe_fields(run), describe_fields(run, every=True)
    assert [line.split()[:2] for line in given.splitlines()[:4]] == [
        ["workflow", "my:Agent"],
        ["tasks.path", "t.jsonl"],
        ["model.path", "m"],
        ["trainer.lr", "1.0e-05"],
    ]
    assert "trainer.betas" not in given
    assert "trainer.betas" in every


@pytest.mark.starts
def test_the_commands_print_to_a_reader_that_stops_early(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_here("explain", "trainer.lr") == 0
    assert capsys.readouterr().out.splitlines()[0] == "trainer.lr"
    piped = subprocess.run(f"{AGENTRL} config | head -1", shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert (piped.stdout.split()[0], piped.stderr) == ("name", "")
