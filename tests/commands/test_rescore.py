"""`agentrl rescore`: stored episodes get new rewards without a model, and what cannot be replayed is named."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import pytest
import yaml

from agentrl import Task, Trajectory
from agentrl.episode.summary import EndedEpisode
from agentrl.errors import ConfigError, RunStopped
from agentrl.observe.episode_files import EpisodeFiles
from agentrl.types import EpisodeFailure, StopReason
from agentrl_testing import Reply, call, play_async
from agentrl_testing.commands.rescore import RescoredEpisode, rescore_command, rescore_run
from tests.support import taped

PUTS: list[Reply] = [call("put", item="bread"), "Done."]
ORDERS: list[Reply] = [call("order", item="milk"), call("put", item="milk"), "Done."]
ENDS_ON_AN_ORDER: list[Reply] = [call("order", item=item) for item in "abcd"]


async def write_stored_run(folder: Path, *scripts: list[Reply]) -> None:
    """Write a run of one step with one episode for each script, and one that failed."""
    write_run_file(folder)
    files = EpisodeFiles(folder / "episodes", next_step=1)
    for number, script in enumerate(scripts):
        task = Task(id=f"t{number}", data={"question": f"buy {number}"})
        put(files, await play_async(taped.Shop(), task, script), number)
    failure = EpisodeFailure(kind="EnvironmentFault", message="the warehouse is closed", traceback="")
    stop = StopReason.ENVIRONMENT_FAULT
    put(files, Trajectory(episode_id="f", task_id="f", turns=(), stop_reason=stop, failure=failure), len(scripts))
    await files.close()


def write_run_file(folder: Path) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    run = {"workflow": "tests.support.taped:Shop", "tasks": {"path": "tasks.jsonl"}, "model": {"path": "model"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(run))


def put(files: EpisodeFiles, trajectory: Trajectory, group: int) -> None:
    files.put(EndedEpisode(trajectory, purpose="training", group=group, step=1, policy_version=0, run_begin_s=0.0))


def outcomes(rescored: list[RescoredEpisode]) -> list[tuple[str, float | None, float | None]]:
    return [(each.outcome, each.before, each.after) for each in rescored]


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    await write_stored_run(tmp_path / "run", PUTS, ORDERS)
    return tmp_path / "run"


async def test_the_same_workflow_gives_the_same_rewards_and_no_tool_acts_again(run: Path) -> None:
    before = list(taped.ORDERS)
    assert outcomes(await rescore_run(run)) == [("scored", 1.0, 1.0), ("scored", 1.5, 1.5), ("failed before", None, None)]
    assert before == taped.ORDERS


async def test_a_changed_reward_is_shown(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rescored.jsonl"
    rescored = await rescore_run(run, workflow_args={"price": 3}, output=output)
    assert outcomes(rescored)[:2] == [("scored", 1.0, 3.0), ("scored", 1.5, 3.5)]
    printed = capsys.readouterr().out
    assert "3 episodes: 2 scored, of which 2 changed" in printed
    assert "mean return of the scored episodes: 1.25 before, 3.25 now" in printed
    assert "task f: EnvironmentFault: the warehouse is closed" in printed
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(line["task_id"], line["after"]) for line in lines] == [("t0", 3.0), ("t1", 3.5), ("f", None)]


async def test_an_episode_whose_workflow_asks_something_else_is_diverged_and_not_scored(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunStopped, match="none of 3 episodes could be scored"):
        await rescore_run(run, workflow_args={"polite": True})
    assert "task t0: call 1: the workflow sent another message 1: expected" in capsys.readouterr().out


async def test_a_tool_reply_that_no_call_holds_is_diverged_unless_tools_run(tmp_path: Path) -> None:
    await write_stored_run(tmp_path / "run", PUTS, ENDS_ON_AN_ORDER)
    first, second, _ = await rescore_run(tmp_path / "run")
    assert (first.outcome, second.outcome) == ("scored", "diverged")
    assert 'the episode asked tool order {"item":"d"}' in second.reason
    assert "--live-tools runs the tools again" in second.reason


async def test_step_and_limit_choose_episodes_and_bad_flags_are_refused(run: Path) -> None:
    assert len(await rescore_run(run, step=1, limit=1)) == 1
    with pytest.raises(ConfigError, match="no stored episodes of step 5"):
        await rescore_run(run, step=5)
    with pytest.raises(ConfigError, match="--limit 0"):
        await rescore_run(run, limit=0)
    with pytest.raises(ConfigError, match="inside the run, which is left as it is"):
        await rescore_run(run, output=run / "rescored.jsonl")


def test_the_command_prints_the_table_and_leaves_the_run_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    anyio.run(write_stored_run, tmp_path / "run", PUTS)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    rescore_command(tmp_path / "run", workflow_args='{"price": 2}')
    assert "2 episodes: 1 scored, of which 1 changed" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
