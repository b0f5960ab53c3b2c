"""`agentrl export`: one ATIF document an episode, which `agentrl view` opens as it opens those of other programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.commands.open_run import Run
from agentrl.errors import ConfigError
from agentrl_viewer.commands.export import export_command
from agentrl_viewer.commands.view import opened, view_run
from agentrl_viewer.exchange.foreign_run import is_foreign
from agentrl_viewer.view.data import RunData
from tests.support.synthetic_run import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step; do not write to it."""
    return write_run(tmp_path_factory.mktemp("runs") / "demo", steps=1)


def test_the_files_that_a_run_exports_show_the_same_episodes(run_dir: Path, tmp_path: Path) -> None:
    export_command(run_dir, output=tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files[:2]] == ["0.0.0.json", "0.1.0.json"]
    assert is_foreign(tmp_path / "out")
    written = {each.summary.episode_id: each for each in Run(run_dir).read_episodes()}
    with opened(tmp_path / "out") as shown:
        assert shown.name == "out"
        read = {each.summary.episode_id: each for each in Run(shown.path).read_episodes()}
        assert read.keys() == written.keys()
        for identity, episode in read.items():
            one, other = episode.trajectory, written[identity].trajectory
            assert [one.messages(leaf) for leaf in one.leaves()] == [other.messages(leaf) for leaf in other.leaves()]
            assert one.branches()[0].token_ids.tolist() == other.branches()[0].token_ids.tolist()
            assert one.branches()[0].token_versions.tolist() == other.branches()[0].token_versions.tolist()
    assert not shown.path.exists()


def test_an_export_names_the_workflow_and_the_run_but_no_path_of_this_machine(run_dir: Path, tmp_path: Path) -> None:
    export_command(run_dir, output=tmp_path, episode="0.0.0")
    [file] = tmp_path.iterdir()
    document = json.loads(file.read_bytes())
    assert (document["agent"]["name"], document["agent"]["model_name"]) == ("agent:Agent", "model")
    assert document["extra"]["agentrl"]["run"] == "demo"
    assert str(run_dir) not in file.read_text()


def test_what_cannot_be_exported_is_one_message_and_leaves_nothing(run_dir: Path, tmp_path: Path) -> None:
    for arguments, message in [
        ({"episode": "99.9.9"}, r"has no stored episode '99\.9\.9'"),
        ({"step": 7}, "has no stored episode of those"),
        ({"limit": 0}, "--limit 0: expected at least 1"),
        ({"output": run_dir / "out"}, "is inside the run"),
    ]:
        given: dict[str, Any] = {"output": tmp_path / "out", **arguments}
        with pytest.raises(ConfigError, match=message):
            export_command(run_dir, **given)
    with pytest.raises(ConfigError, match="is no run directory"):
        export_command(tmp_path, output=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_a_file_of_another_program_shows_what_followed_the_last_answer(tmp_path: Path) -> None:
    steps = [
        {"step_id": 1, "source": "user", "message": "Delete it."},
        {"step_id": 2, "source": "agent", "message": "rm it", "observation": {"results": [{"content": "It is gone."}]}},
    ]
    agent = {"name": "terminus-2", "version": "2"}
    file = tmp_path / "trajectory.json"
    file.write_text(json.dumps({"schema_version": "ATIF-v1.8", "agent": agent, "steps": steps}))
    view_run([file], port=0, opens_browser=False, html=tmp_path / "page.html", episode_id=None)
    [carried] = re.findall(r'id="embedded">(.*?)</script>', (tmp_path / "page.html").read_text(), re.S)
    found = json.loads(carried)
    assert found["run"] == {"name": "trajectory.json"}
    assert found["episode"]["turns"][0]["closing"] == [{"role": "user", "content": "It is gone."}]
    assert (found["episode"]["summary"]["success"], found["episode"]["summary"]["episode_return"]) == (None, None)


def test_two_files_of_one_session_are_two_episodes_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    agent = {"name": "a", "version": "1"}
    document = {"schema_version": "ATIF-v1.7", "session_id": "s/1", "agent": agent, "steps": []}
    for name in ("one", "two"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "result.json").write_text('{"reward": 1}')
    with opened(tmp_path) as shown:
        assert [row.episode_id for row in Run(shown.path).episodes()] == ["s/1", "s/1 (2)"]
    (tmp_path / "two.json").write_text(json.dumps(document)[:-1])
    with pytest.raises(ConfigError, match=r"two\.json is no ATIF document"), opened(tmp_path):
        pass
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        RunData(tmp_path)
