"""What a person sees."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import anyio
import pytest
from rich.console import Console

from agentrl.observe.progress import LiveProgress, NoProgress, PlainProgress, Snapshot, StepPace, make_progress, picture
from tests.engine.harness import TASKS, make_engine, run
from tests.rollout.harness import make_renderer

SNAPSHOT = Snapshot(
    name="demo",
    step=30,
    steps=90,
    policy_version=30,
    wall_s=60.0,
    max_staleness=2,
    step_s=2.0,
    sampled_tokens=12345,
    episodes_in_flight=7,
    groups_complete=2,
    groups_outstanding=9,
    failed_episodes=3,
    dropped_groups=1,
    success_rate=0.625,
    return_mean=0.5,
    staleness_mean=0.75,
    staleness_max=2.0,
    tokens_per_s=1500.0,
    last_evaluation="evaluation after step 25: success 0.700 of 128",
    waits=("the trainer waits for group 17 since 4.0 s",),
)


def shown(snapshot: Snapshot) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(snapshot))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_picture_has_success_staleness_speed_waits_and_time_left() -> None:
    text = shown(SNAPSHOT)
    for part in (
        "step 30/90, version 30, 1 min 00 s, about 2 min 00 s left",
        "0.625",
        "mean 0.75, max 2, bound 2",
        "1500 a second",
        "7 episodes in flight, 2 of 9 open groups complete, 3 episodes failed, 1 groups dropped",
        "after step 25: success 0.700 of 128",
        "the trainer waits for group 17 since 4.0 s",
    ):
        assert part in text


def test_a_run_that_has_just_begun_can_be_shown() -> None:
    assert "step 0/5" in shown(Snapshot(name="r", step=0, steps=5, policy_version=0, wall_s=0.0, max_staleness=0))


def test_without_a_terminal_each_step_is_a_line() -> None:
    stream = io.StringIO()
    progress = make_progress(stream)
    assert isinstance(progress, PlainProgress)
    progress.step(SNAPSHOT)
    assert stream.getvalue() == (
        "step 30/90, version 30, success 0.625, return +0.500, staleness mean 0.75 max 2 of 2, 1500 tokens/s, 3 failed, "
        "1 dropped, 60 s, about 2 min 00 s left\n"
    )


async def test_the_live_display_is_redrawn_until_cancelled_and_leaves_the_last_picture() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with anyio.move_on_after(0.05):
        await LiveProgress(console).show(lambda: SNAPSHOT)
    assert isinstance(console.file, io.StringIO)
    assert "step 30/90" in console.file.getvalue()


class Broken(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, s: str, /) -> int:
        raise BrokenPipeError("no reader")


async def test_a_display_that_breaks_does_not_end_the_run() -> None:
    plain = PlainProgress(Broken())
    for _ in range(2):
        plain.step(SNAPSHOT)
    closed = io.StringIO()
    closed.close()
    PlainProgress(closed).step(SNAPSHOT)
    with anyio.fail_after(300):
        await LiveProgress(Console(file=Broken(), width=120, force_terminal=True)).show(lambda: SNAPSHOT)


def test_a_stream_that_broke_takes_what_is_written_later() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        PlainProgress(stream).step(SNAPSHOT)
        stream.write("later")
        stream.flush()


def test_without_a_standard_error_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(make_progress(), NoProgress)


class Watched(io.StringIO):
    """A stream that says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = anyio.Event()

    def write(self, s: str, /) -> int:
        self.written.set()
        return super().write(s)


async def test_a_log_without_a_line_for_long_says_how_far_the_next_step_is() -> None:
    stream = Watched()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(PlainProgress(stream, quiet_s=0.001).show, lambda: SNAPSHOT)
        with anyio.fail_after(300):
            await stream.written.wait()
        tasks.cancel_scope.cancel()
    assert stream.getvalue().splitlines()[0] == (
        "step 31/90 is under way: 2 of 9 open groups complete, 7 episodes in flight, 60 s, about 2 min 00 s left"
    )


def test_time_left_counts_what_a_step_takes_lately_and_no_start() -> None:
    pace = StepPace()
    assert pace.seconds is None
    pace.ended(100.0, first_s=10.0)  # of the 100 seconds, 90 went to the start of servers and to the first, lonely batch
    assert pace.seconds == 10.0
    pace.ended(112.0, first_s=10.0)
    pace.ended(126.0, first_s=10.0)
    assert pace.seconds == 13.0
    for number in range(StepPace.WINDOW):
        pace.ended(126.0 + 30.0 * (number + 1), first_s=10.0)
    assert pace.seconds == 30.0


async def test_the_plain_display_waits_to_be_cancelled() -> None:
    with anyio.move_on_after(0.01) as scope:
        await PlainProgress(io.StringIO()).show(lambda: SNAPSHOT)
    assert scope.cancelled_caught


def test_a_log_has_a_line_for_each_evaluation_and_the_summary() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream)
    progress.evaluation("evaluation after step 5: success 0.500")
    progress.end("run  r: finished\nnext\n  agentrl view runs/r")
    assert stream.getvalue() == ("evaluation after step 5: success 0.500\nrun  r: finished\nnext\n  agentrl view runs/r\n")


def test_the_live_display_prints_the_summary_as_it_is() -> None:
    stream = io.StringIO()
    LiveProgress(Console(file=stream, width=20)).end("checkpoint  runs/r/checkpoints/step-000003 [bold]")
    assert stream.getvalue() == "checkpoint  runs/r/checkpoints/step-000003 [bold]\n"


async def test_a_run_writes_its_evaluations_into_a_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    renderer = make_renderer(tmp_path)
    engine = {"eval_every": 1, "eval_episodes": 2}
    await run(make_engine(tmp_path, renderer, steps=2, eval_tasks=TASKS[:2], engine=engine, progress=PlainProgress(stream)))
    found = [line for line in stream.getvalue().splitlines() if line.startswith("evaluation after step ")]
    assert len(found) == 2
    assert "0 of 2 episodes failed" in found[0]
