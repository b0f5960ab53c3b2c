"""Fields that run files had once: what holds now loads with a warning, and what does not is refused with the replacement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config, parse_config
from agentrl.config.describe import config_fields
from agentrl.config.removed import REMOVED
from agentrl.config.run import RunConfig
from agentrl.errors import ConfigError

BASE: dict[str, Any] = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}
TEXT = "workflow: my:Agent\ntasks: {path: t.jsonl}\nmodel: {path: m}\n"


def with_field(path: str, value: object) -> dict[str, Any]:
    section, _, name = path.rpartition(".")
    return {**BASE, section: {name: value}}


@pytest.mark.parametrize("path", REMOVED)
def test_a_removed_field_with_the_value_that_holds_now_loads_with_a_warning(path: str) -> None:
    with pytest.warns(FutureWarning, match=rf"{path}: this field is gone: .*; remove it"):
        run = parse_config(with_field(path, REMOVED[path].holds))
    assert run == parse_config(BASE)


@pytest.mark.parametrize("path", REMOVED)
def test_a_removed_field_with_another_value_is_refused_with_what_holds_now(path: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(with_field(path, 7))
    assert str(refused.value).endswith(f"  {path}: this field is gone, got 7: {REMOVED[path].now}; remove it")


def test_a_flag_may_not_name_a_removed_field_either() -> None:
    with pytest.raises(ConfigError, match=r"engine\.keep_published: this field is gone, got 5"):
        parse_config(BASE, ["--engine.keep_published", "5"])


def test_the_file_that_an_earlier_run_recorded_is_read_whatever_its_values(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(TEXT + "engine: {checkpoint_every_s: 60.0, steps: 3}\n")
    with pytest.raises(ConfigError, match=r"checkpoint_every_s: this field is gone, got 60\.0"):
        load_config(file)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.warns(FutureWarning, match="it was 60.0 in this run"):
        assert load_config(file).engine.steps == 3


def test_no_field_of_today_is_called_removed() -> None:
    assert not {field.path for field in config_fields(RunConfig)} & REMOVED.keys()
