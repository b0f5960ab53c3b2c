"""A run is read back from its directory: episodes, steps, what was trained, the text of tokens."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agentrl.commands.open_run import Run, open_run
from agentrl.episode.codec import encode_line
from agentrl.episode.summary import INDEX_HEADER
from agentrl.errors import ConfigError
from agentrl.observe.episode_files import EpisodeFiles
from agentrl.observe.runs.plot import plot_curves
from agentrl.observe.runs.reading import read_index
from agentrl.observe.runs.table import EpisodeTable
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from tests.engine.harness import TASKS, make_engine, run
from tests.support.summaries import episode_summary

HELD_OUT = TASKS[:2]


@pytest.fixture
async def finished(tmp_path: Path, renderer: Renderer) -> Run:
    trainer = ScriptedTrainer()
    engine = {"eval_every": 2, "eval_episodes": 2}
    await run(make_engine(tmp_path, renderer, trainer=trainer, steps=4, eval_tasks=HELD_OUT, engine=engine))
    return open_run(tmp_path)


async def test_the_index_has_every_episode_and_each_row_finds_its_record(finished: Run) -> None:
    table = finished.episodes()
    assert (len(table), len(finished.episodes(purpose="evaluation"))) == (24 + 4, 4)
    assert {row.step for row in table} <= {1, 2, 3, 4, 5}
    for row in table:
        stored = finished.episode(row.episode_id)
        trajectory = stored.trajectory
        assert (stored.summary, trajectory.episode_id, trajectory.episode_return) == (
            row,
            row.episode_id,
            row.episode_return,
        )
        assert (len(trajectory.turns), trajectory.num_output_tokens) == (row.turns, row.output_tokens)
        assert stored.task is not None
        assert (stored.task.id, stored.task["answer"]) == (row.task_id, "good")
    streamed = [stored.summary for stored in finished.read_episodes()]
    assert sorted(row.episode_id for row in streamed) == sorted(row.episode_id for row in table)
    assert [each.summary.step for each in finished.read_episodes(step=2)] == [2] * len(finished.episodes(step=2))


async def test_a_stored_trajectory_has_the_tokens_messages_and_times_of_the_call(finished: Run, renderer: Renderer) -> None:
    row = finished.episodes(purpose="training")[0]
    trajectory = finished.episode(row.episode_id).trajectory
    [turn] = trajectory.turns
    assert trajectory.task is not None
    asked = {"role": "user", "content": trajectory.task["question"]}
    assert trajectory.messages() == [asked, turn.message]
    [sample] = trajectory.branches()
    assert sample.loss_mask.sum() == row.output_tokens
    assert trajectory.task["question"] in renderer.decode(turn.context_ids, skip_special=False)
    times = [row.started_s, turn.started_s, turn.ended_s, row.ended_s]
    known = [time for time in times if time is not None]
    assert len(known) == 4
    assert [0.0, *known] == sorted([0.0, *known])


async def test_what_a_step_trained_is_found_by_episode(finished: Run) -> None:
    steps = finished.metrics("step")
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    for row in finished.episodes(purpose="training"):
        trained = finished.episode(row.episode_id).trained
        assert trained is not None
        assert row.group in steps[trained.step - 1]["trained_groups"]
        assert trained.policy_version == steps[trained.step - 1]["policy_version"]
    all_advantages: list[float] = []
    for group in range(8):
        members = finished.episodes().of_group(group)
        found = [finished.episode(row.episode_id).trained for row in members]
        advantages = [each.turns[0].advantage or 0.0 for each in found if each is not None]
        returns = np.array([row.episode_return for row in members])
        assert np.allclose(advantages, returns - returns.mean(), atol=1e-6)
        all_advantages += advantages
    assert any(all_advantages)
    assert all(finished.episode(row.episode_id).trained is None for row in finished.episodes(purpose="evaluation"))


async def test_token_ids_have_text_where_the_run_has_a_tokenizer(finished: Run, model_dir: Path) -> None:
    stored = next(finished.read_episodes())
    ids = stored.trajectory.turns[0].output_ids.tolist()
    assert stored.token_texts(ids) is None
    checkpoint = finished.path / "checkpoints" / "step-000009"
    checkpoint.mkdir(parents=True)
    shutil.copy(model_dir / "tokenizer.json", checkpoint)
    texts = finished.episode(stored.summary.episode_id).token_texts(ids)
    assert texts is not None
    assert "".join(texts).startswith(stored.trajectory.turns[0].message["content"])


def test_a_table_sorts_and_selects() -> None:
    rows = [
        episode_summary(0),
        episode_summary(1, failure="E", episode_return=None, success=None),
        episode_summary(9, forks={"history_edited": 1}),
        episode_summary(3),
    ]
    table = EpisodeTable(rows)
    assert [each.episode_id for each in table.best(2)] == ["9", "3"]
    assert [each.episode_id for each in table.worst(2)] == ["0", "3"]
    assert [each.episode_id for each in table.failed()] == ["1"]
    assert [each.episode_id for each in table.forked()] == ["9"]
    assert [each.episode_id for each in table.of_group(0)] == ["0", "1", "3"]
    assert [each.episode_id for each in table[1:]] == ["1", "9", "3"]
    assert table.to_dicts()[2]["forks"] == {"history_edited": 1}
    assert repr(table) == "EpisodeTable(4 episodes, 1 failed)"


def test_fifty_thousand_lines_of_an_index_are_read_at_once(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    lines = b"".join(msgspec.json.encode(episode_summary(number)) + b"\n" for number in range(50_000))
    (tmp_path / "episodes" / "index.jsonl").write_bytes(encode_line(INDEX_HEADER) + lines)
    assert len(read_index(tmp_path)) == 50_000


def test_half_a_line_and_lines_that_a_mark_takes_back_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    folder.mkdir()
    mark = {"event": "resumed", "step": 1, "groups_admitted": 1, "groups_open": [], "evaluations_due": []}
    lines = [encode_line(INDEX_HEADER), *(msgspec.json.encode(episode_summary(number)) + b"\n" for number in (0, 8))]
    (folder / "index.jsonl").write_bytes(b"".join([*lines, encode_line(mark), lines[2], b'{"episode']))
    assert [each.episode_id for each in read_index(tmp_path)] == ["0", "8"]


async def test_a_pruned_episode_is_named_and_left_out_of_streams(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    files = EpisodeFiles(tmp_path / "episodes", next_step=1)
    await files.close()
    with (tmp_path / "episodes" / "index.jsonl").open("ab") as index:
        index.write(msgspec.json.encode(episode_summary(0)) + b"\n")
    found = open_run(tmp_path)
    assert list(found.read_episodes()) == []
    with pytest.raises(ConfigError, match=r"episode 0: engine\.keep_episode_steps"):
        found.episode("0")


def test_a_directory_without_a_run_and_an_unknown_episode_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        open_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"has no episode '1\.2\.3'"):
        open_run(tmp_path).episode("1.2.3")
    assert (open_run(tmp_path).config, open_run(tmp_path).name) == (None, tmp_path.name)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "index.jsonl").write_text('{"format":"agentrl.episodes.index","version":2}\n')
    with pytest.raises(ConfigError, match=r"index\.jsonl: expected the header .*\"version\":1"):
        read_index(tmp_path)


async def test_a_stored_episode_shows_its_tokens_and_advantages(finished: Run, capsys: pytest.CaptureFixture[str]) -> None:
    row = finished.episodes(purpose="training")[0]
    stored = finished.episode(row.episode_id)
    stored.show(tokens=True)
    shown = capsys.readouterr().out
    assert f"episode {row.episode_id}, task {row.task_id}" in shown
    assert "advantage" in shown
    assert "in the loss" in stored._repr_html_()  # pyright: ignore[reportPrivateUsage] - the name that notebooks call


@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
async def test_a_run_plots_its_curves(finished: Run) -> None:
    figure = finished.plot()
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert [*panels] == ["return", "success", "staleness"]
    [line, evaluated] = panels["success"].lines
    assert np.asarray(line.get_xdata()).tolist() == [1, 2, 3, 4]
    evaluations = list(finished.metrics("evaluation"))
    assert np.asarray(evaluated.get_xdata()).tolist() == [event["step"] for event in evaluations]
    ranges = [sorted({event["min_version"], event["max_version"]}) for event in evaluations]
    assert [text.get_text() for text in panels["success"].texts] == [f"v{'-'.join(map(str, some))}" for some in ranges]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib")
def test_each_evaluation_of_a_curve_names_the_versions_that_sampled_it() -> None:
    ranges = ({"min_version": 3, "max_version": 3}, {"min_version": 5, "max_version": 7}, {})
    evaluations = [{"step": step, "success_rate": 0.5, **some} for step, some in enumerate(ranges)]
    figure = plot_curves([], evaluations, title="run")
    [success] = [axes for axes in figure.axes if axes.get_title() == "success"]
    assert [text.get_text() for text in success.texts] == ["v3", "v5-7"]


def test_a_missing_package_of_a_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ConfigError, match=r"needs pandas; pip install 'agentrl\[tables\]'"):
        EpisodeTable([episode_summary(0)]).to_pandas()
    with pytest.raises(ConfigError, match=r"needs polars; pip install 'agentrl\[tables\]'"):
        EpisodeTable([episode_summary(0)]).to_polars()
