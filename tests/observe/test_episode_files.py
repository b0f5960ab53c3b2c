"""The folder of a run's episodes: nothing is lost, doubled or half written, compressed or not, resumed or not."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest

from agentrl.episode.codec import RECORDED_EPISODE, RECORDED_TURN, encode_line, stored_trajectory, trajectory_record
from agentrl.episode.summary import EndedEpisode, EpisodeSummary, TrainedEpisode, TrainedTurn, summarize, trained_record
from agentrl.errors import RunStopped
from agentrl.observe.episode_files import MAX_PENDING_RECORDS, EpisodeFiles, read_lines
from agentrl.types import EpisodeFailure, ForkReason, StopReason, Task, Trajectory, Turn, VersionSpan


def turn(**changes: Any) -> Turn:  # noqa: ANN401 - any field of a turn
    fields: dict[str, Any] = {
        "context_ids": np.array([5, 6], np.int32),
        "output_ids": np.array([7, 8, 9], np.int32),
        "output_logprobs": np.array([-0.1, -2.25, -1e-7], np.float32),
        "spans": (VersionSpan(start=0, end=1, version=3), VersionSpan(start=1, end=3, version=4)),
        "stop_reason": StopReason.STOP,
        "sent_after": 0,
        "sent_at": 0,
        "reward": 0.5,
        "rewarded_at": 1,
        "message": {"role": "assistant", "content": "hm"},
        "messages": ({"role": "user", "content": "2 + 2?"},),
        "tools": ({"type": "function", "function": {"name": "add"}},),
        "started_s": 101.0,
        "ended_s": 102.5,
    }
    return Turn(**{**fields, **changes})


def episode(identity: str = "0.0.0", **changes: Any) -> Trajectory:  # noqa: ANN401 - any field of a trajectory
    fields: dict[str, Any] = {
        "episode_id": identity,
        "task_id": "t",
        "turns": (turn(),),
        "stop_reason": StopReason.COMPLETED,
        "final_reward": 1.0,
        "metrics": {"busy": 1.0},
        "task": Task(id="t", data={"question": "2 + 2?"}),
        "started_s": 100.0,
        "ended_s": 103.0,
    }
    return Trajectory(**{**fields, **changes})


def ended(trajectory: Trajectory, *, step: int = 1, group: int | None = 0) -> EndedEpisode:
    purpose = "evaluation" if group is None else "training"
    return EndedEpisode(trajectory, purpose=purpose, group=group, step=step, policy_version=3, run_begin_s=100.0)


def records(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(folder / f"step-{step:06d}.jsonl") if line != b"\n"][1:]


def index(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(folder / "index.jsonl")][1:]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def nothing() -> Iterator[dict[str, object]]:
    return iter(())


async def write_steps(folder: Path, steps: range, *, keep_steps: int | None = None, evaluated: tuple[int, ...] = ()) -> None:
    """Write a run in which one training episode ends in each step, and an evaluation in some."""
    files = EpisodeFiles(folder, next_step=steps.start, keep_steps=keep_steps)
    for step in steps:
        files.put(ended(episode(f"{step}.0.0"), step=step, group=step))
        if step in evaluated:
            files.put(ended(episode(f"eval.{step}.0"), step=step, group=None))
        files.end_step(step, nothing)
    await files.close()


def test_the_record_has_the_fields_that_are_declared_and_is_read_as_the_same_trajectory() -> None:
    trajectory = episode(turns=(turn(), turn(parent=0, fork=ForkReason.HISTORY_EDITED, player="white", tools=None)))
    line = encode_line(trajectory_record(ended(trajectory)))
    raw, read = json.loads(line), stored_trajectory(line)
    assert {*raw} == {*RECORDED_EPISODE, "purpose", "group", "step", "policy_version", "episode_return", "success"}
    assert [*raw["turns"][0]] == [name for name in RECORDED_TURN if name != "truncated_by"]  # as no token was ruled out
    assert (raw["group"], raw["episode_return"], raw["success"], read.failure, read.metrics) == (
        0,
        2.0,
        True,
        None,
        {"busy": 1.0},
    )
    assert (read.task, read.started_s, read.ended_s) == (trajectory.task, 0.0, 3.0)
    [first, second] = read.turns
    for name in ("context_ids", "output_ids", "output_logprobs"):
        mine, theirs = getattr(first, name), getattr(trajectory.turns[0], name)
        assert (mine.tolist(), mine.dtype) == (theirs.tolist(), theirs.dtype)
    assert (first.spans, first.started_s, first.message["content"]) == (trajectory.turns[0].spans, 1.0, "hm")
    assert first.messages == ({"role": "user", "content": "2 + 2?"},)
    assert (second.fork, second.player, second.tools) == (ForkReason.HISTORY_EDITED, "white", None)


def test_the_line_of_a_step_has_the_fields_that_readers_decode() -> None:
    trajectory = episode(turns=(turn(), turn(parent=0)))
    trained = trained_record(
        trajectory, step=1, policy_version=4, advantages=[0.5, None], proximal_logprobs=[np.array([-1, np.nan, -1]), None]
    )
    back = msgspec.json.decode(encode_line(trained), type=TrainedEpisode)
    assert ([*trained], back.turns) == (
        [*TrainedEpisode.__struct_fields__],
        [
            TrainedTurn(advantage=0.5, proximal_logprobs=[-1.0, None, -1.0]),
            TrainedTurn(advantage=None, proximal_logprobs=None),
        ],
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What\n  is 2?"}], "What is 2?"),
        ([{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "Look."}]}], "Look."),
        ([{"role": "user", "content": "a" * 1000}], "a" * 160),
        ([{"role": "user", "content": None}, {"role": "user", "content": 7}], ""),
        ([{"role": "system", "content": "Be brief."}], ""),
    ],
)
def test_the_index_has_the_first_words_of_the_prompt(messages: list[dict[str, Any]], words: str) -> None:
    first = turn(messages=tuple(messages))
    assert summarize(ended(episode(turns=(first,))), file="step-000001", line=1).prompt == words


def test_an_index_line_of_an_older_release_has_no_words() -> None:
    line = msgspec.to_builtins(summarize(ended(episode()), file="step-000001", line=1))
    del line["prompt"]
    assert msgspec.convert(line, EpisodeSummary).prompt == ""


def test_a_failed_episode_has_neither_return_nor_success() -> None:
    failure = EpisodeFailure(kind="E", message="m", traceback="tb")
    record = trajectory_record(ended(episode(turns=(), stop_reason=StopReason.DEADLINE, final_reward=None, failure=failure)))
    assert (record["episode_return"], record["success"]) == (None, None)
    assert record["failure"] == {"kind": "E", "message": "m", "traceback": "tb", "after_turn": None}


async def test_records_put_before_the_end_are_on_disk_after_it_in_order(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, next_step=1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(files.write)
        for number in range(50):
            files.put(ended(episode(str(number))))
            if number % 10 == 0:
                await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    files.put(ended(episode("50")))
    await files.close()
    assert [record["episode_id"] for record in records(tmp_path, 1)] == [str(number) for number in range(51)]
    rows = [msgspec.convert(line, EpisodeSummary) for line in index(tmp_path)]
    assert [(row.episode_id, row.file, row.line) for row in rows] == [(str(n), "step-000001", n + 1) for n in range(51)]


async def test_a_prompt_with_half_of_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, next_step=1)
    files.put(ended(episode("half \ud83d", turns=(turn(messages=({"role": "user", "content": "half \ud83d"},)),))))
    await files.close()
    [line] = index(tmp_path)
    assert (line["episode_id"], line["prompt"]) == ("half \\ud83d", "half \\ud83d")


async def test_closing_inside_a_cancelled_scope_still_writes_what_is_left(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, next_step=1)
    files.put(ended(episode()))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await files.close()
    assert len(records(tmp_path, 1)) == len(index(tmp_path)) == 1


async def test_records_that_the_disk_does_not_take_in_time_are_counted(tmp_path: Path) -> None:
    def slowly() -> Iterator[dict[str, object]]:
        time.sleep(0.2)  # in a worker thread, as a slow disk would be
        return nothing()

    files = EpisodeFiles(tmp_path, next_step=1, drain_timeout_s=0.05)
    files.end_step(1, slowly)
    for number in range(3):
        files.put(ended(episode(str(number)), step=2))
    with pytest.raises(RunStopped, match=r"3 records were not on disk 0\.05 s after the run ended"):
        await files.close()


async def test_a_disk_that_does_not_keep_up_stops_the_run(tmp_path: Path) -> None:
    files, one = EpisodeFiles(tmp_path, next_step=1), ended(episode())
    for _ in range(MAX_PENDING_RECORDS):
        files.put(one)
    with pytest.raises(RunStopped, match="does not keep up"):
        files.put(one)
    await files.close()


async def test_the_file_of_an_ended_step_is_compressed_and_the_next_one_is_begun(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, next_step=7)
    files.put(ended(episode("a"), step=7))
    files.end_step(7, lambda: [{"episode_id": "a"}])
    files.put(ended(episode("b"), step=8))
    await files.close()
    assert names(tmp_path) == [
        "index.jsonl",
        "step-000007.jsonl.gz",
        "step-000008.jsonl",
        "trained-000007.jsonl.gz",
    ]
    assert [[record["episode_id"] for record in records(tmp_path, step)] for step in (7, 8)] == [["a"], ["b"]]
    [header, line] = gzip.decompress((tmp_path / "trained-000007.jsonl.gz").read_bytes()).splitlines()
    assert json.loads(header) == {"format": "agentrl.episodes.trained", "version": 1}
    assert json.loads(line) == {"episode_id": "a"}


async def test_a_resumed_run_appends_to_the_compressed_file_of_its_first_step(tmp_path: Path) -> None:
    await write_steps(tmp_path, range(1, 4))
    files = EpisodeFiles(tmp_path, next_step=2, mark={"step": 1})
    assert not (tmp_path / "trained-000003.jsonl.gz").exists()
    assert (tmp_path / "trained-000001.jsonl.gz").exists()
    files.put(ended(episode("again"), step=2))
    await files.close()
    assert [record["episode_id"] for record in records(tmp_path, 2)] == ["2.0.0", "again"]
    assert [(line.get("event"), line.get("line")) for line in index(tmp_path)[-2:]] == [("resumed", None), (None, 2)]


async def test_files_that_a_killed_process_left_plain_are_compressed_by_the_next_one(tmp_path: Path) -> None:
    await write_steps(tmp_path, range(1, 3))
    packed = tmp_path / "step-000001.jsonl.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    await EpisodeFiles(tmp_path, next_step=3).close()
    assert packed.exists()
    assert not packed.with_suffix("").exists()
    assert [record["episode_id"] for record in records(tmp_path, 1)] == ["1.0.0"]


@pytest.mark.parametrize("resumed", [False, True])
async def test_the_training_episodes_of_earlier_steps_are_deleted_and_evaluations_keep_their_lines(
    tmp_path: Path, resumed: bool
) -> None:
    await write_steps(tmp_path, range(1, 6), keep_steps=None if resumed else 2, evaluated=(2, 5))
    if resumed:
        await EpisodeFiles(tmp_path, next_step=6, keep_steps=2).close()
    trained = [f"trained-00000{step}.jsonl.gz" for step in (4, 5)]
    assert names(tmp_path)[1:] == [*(f"step-00000{step}.jsonl.gz" for step in (2, 4, 5)), *trained]
    assert len(index(tmp_path)) == 7
    lines = list(read_lines(tmp_path / "step-000002.jsonl"))
    assert (lines[1], json.loads(lines[2])["episode_id"]) == (b"\n", "eval.2.0")


async def test_a_record_file_that_was_deleted_is_noticed(tmp_path: Path) -> None:
    files = EpisodeFiles(tmp_path, next_step=1)
    files.put(ended(episode()))
    await files.flush()
    await files.check_in_place()
    (tmp_path / "step-000001.jsonl").unlink()
    with pytest.raises(RunStopped, match=r"step-000001\.jsonl was deleted"):
        await files.check_in_place()
    await files.close()
