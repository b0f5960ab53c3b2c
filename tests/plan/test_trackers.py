"""The trackers that a run file names, before a run and in one."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig, parse_config
from agentrl.errors import ConfigError
from agentrl.observe.trackers.to_jsonl import JsonlTracker
from agentrl.plan.checks import missing_here
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan
from agentrl.plan.trackers import BUNDLED, load_trackers

TRACKER = """
from agentrl.errors import ConfigError
from agentrl.observe.trackers.base import Tracker


class Mine(Tracker):
    pass


class Needy(Tracker):
    def __init__(self, address):
        pass


class Unready(Tracker):
    def __init__(self):
        raise ConfigError("MY_KEY is not set")


class Stranger:
    pass
"""


def make_run(**fields: Any) -> RunConfig:  # noqa: ANN401 - fields of a run file
    return parse_config({"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}, **fields})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_trackers.py").write_text(TRACKER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_one_name_needs_no_list() -> None:
    assert make_run(track="jsonl").track == ("jsonl",)


def test_bundled_trackers_and_a_class_of_the_user_are_made(here: Path) -> None:
    found = load_trackers(make_run(track=["jsonl", "my_trackers:Mine"]))
    assert list(found) == ["jsonl", "my_trackers:Mine"]
    assert isinstance(found["jsonl"], JsonlTracker)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tensorbord", "expected tensorboard, wandb, mlflow, opentelemetry, jsonl or module:Class, got 'tensorbord'"),
        ("my_trackers:Stranger", "is not a tracker: expected a class that derives from"),
        ("my_trackers:Nothing", "is not a tracker: expected a class that derives from"),
        ("my_trackers:Needy", r"Needy\(\) raised TypeError: .*a tracker takes no arguments"),
        ("my_trackers:Unready", r"^MY_KEY is not set$"),
        ("no_such_module:Mine", "track: there is no module 'no_such_module'"),
    ],
)
def test_what_is_no_tracker_is_named_before_anything_starts(here: Path, name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_trackers(make_run(track=[name]))


@pytest.mark.parametrize("name", sorted(name for name, bundled in BUNDLED.items() if bundled.package is not None))
def test_a_missing_package_names_its_extra(name: str) -> None:
    package = BUNDLED[name].package
    with suppress(ModuleNotFoundError):
        if package is not None and find_spec(package) is not None:
            pytest.skip(f"{package} is installed")
    with pytest.raises(ConfigError, match=rf"track: {name} needs the package .* pip install 'agentrl\[{name}\]'"):
        load_trackers(make_run(track=[name]))


def test_the_plan_names_the_trackers_and_what_they_lack(here: Path) -> None:
    run = make_run(track=["my_trackers:Stranger"], track_project="p")
    assert "trackers    my_trackers:Stranger, project p, with 3 episodes of each step and evaluation" in describe_plan(
        plan_run(run)
    )
    assert any("is not a tracker" in line for line in missing_here(plan_run(run)))
