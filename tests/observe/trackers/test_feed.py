"""What a run records reaches its trackers, which can neither delay nor end it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.timeline import Activity
from agentrl.observe.trackers.base import RunStatus, TrackedRun, Tracker
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.observe.trackers.to_jsonl import JsonlTracker
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from tests.engine.harness import TASKS, lines, make_engine, run
from tests.rollout.harness import make_renderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return make_renderer(tmp_path_factory.mktemp("renderer"))


def make_feed(folder: Path, trackers: Mapping[str, Tracker], **limits: Any) -> TrackerFeed:  # noqa: ANN401 - of the feed
    described = TrackedRun(name="r", run_dir=folder, project="p", config={}, resumed_step=0, began_at=1_000_000.0)
    bounds = {"finish_timeout_s": 60, **limits}
    return TrackerFeed(trackers, described, samples=3, decode=lambda ids: f"{len(ids)} tokens", **bounds)


class Broken(Tracker):
    def __init__(self) -> None:
        self.calls = 0
        self.finished: list[str] = []

    def finish(self, status: RunStatus) -> None:
        self.finished.append(status)
        raise OSError("the service is still gone")

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError("the service is gone")


class Stuck(Tracker):
    def __init__(self) -> None:
        self.go_on = threading.Event()

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        self.go_on.wait(300)


class Watcher(Tracker):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def activity(self, activity: Activity) -> None:
        self.seen.append(activity.activity)


async def test_a_run_hands_on_steps_evaluations_and_some_episodes(tmp_path: Path, renderer: Renderer) -> None:
    feed = make_feed(tmp_path, {"jsonl": JsonlTracker()})
    engine = {"eval_every": 2, "eval_episodes": 2}
    await run(make_engine(tmp_path, renderer, steps=2, eval_tasks=TASKS[:2], engine=engine, trackers=feed))
    calls = lines(tmp_path / "tracked.jsonl")
    assert [call["call"] for call in calls if call["call"] in ("start", "finish")] == ["start", "finish"]
    steps = [call for call in calls if call["call"] == "step"]
    written = lines(tmp_path / "metrics.jsonl", "step")
    assert [call["step"] for call in steps] == [1, 2]
    assert [call["numbers"]["return_mean"] for call in steps] == [line["return_mean"] for line in written]
    [evaluation] = [call for call in calls if call["call"] == "evaluation"]
    assert evaluation["numbers"]["episodes"] == 2
    chosen = [(call["purpose"], [one["choice"] for one in call["episodes"]]) for call in calls if call["call"] == "episodes"]
    assert chosen.count(("training", ["best", "worst", "random"])) == 2
    assert ("evaluation", ["best", "worst"]) in chosen


async def test_a_tracker_that_fails_is_reported_once_and_left_out(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken()
    feed = make_feed(tmp_path, {"broken": broken, "jsonl": JsonlTracker()})
    report = await run(make_engine(tmp_path, renderer, steps=3, trackers=feed))
    assert (report.train_steps, broken.calls, broken.finished) == (3, 1, ["failed"])
    assert [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()] == [
        "tracker broken: OSError: the service is gone. The run continues without it; metrics.jsonl has everything"
    ]
    assert len(lines(tmp_path / "tracked.jsonl")) == 1 + 3 * 2 + 1, "the other tracker has everything"


class Exits(Tracker):
    def finish(self, status: RunStatus) -> None:
        raise SystemExit(f"finished as {status}")

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        raise SystemExit("the licence has expired")


async def test_a_tracker_that_exits_the_program_is_left_out_like_one_that_fails(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    feed = make_feed(tmp_path, {"exits": Exits(), "jsonl": JsonlTracker()})
    assert (await run(make_engine(tmp_path, renderer, steps=3, trackers=feed))).train_steps == 3
    assert [record.getMessage() for record in caplog.records if "tracker" in record.getMessage()] == [
        "tracker exits: SystemExit: the licence has expired. The run continues without it; metrics.jsonl has everything"
    ]
    assert len(lines(tmp_path / "tracked.jsonl")) == 1 + 3 * 2 + 1, "the other tracker has everything"


async def test_a_tracker_that_hangs_delays_nothing_but_the_end(
    tmp_path: Path, renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    stuck = Stuck()
    feed = make_feed(tmp_path, {"stuck": stuck}, finish_timeout_s=0.05)
    report = await run(make_engine(tmp_path, renderer, steps=3, trackers=feed))
    assert report.train_steps == 3
    assert "tracker stuck: it has not finished 0.05 s after the run" in caplog.text
    stuck.go_on.set()


async def test_a_tracker_that_falls_behind_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stuck = Stuck()
    feed = make_feed(tmp_path, {"stuck": stuck}, max_pending=2)
    feed.start()
    for step in range(1, 6):
        feed.step(step, 0.0, {}, [])
    stuck.go_on.set()
    await feed.close("finished")
    assert caplog.text.count("tracker stuck: it is 2 records behind") == 1


async def test_a_tracker_may_follow_the_timeline(tmp_path: Path, renderer: Renderer) -> None:
    watcher = Watcher()
    await run(make_engine(tmp_path, renderer, steps=2, trackers=make_feed(tmp_path, {"mine": watcher})))
    assert watcher.seen.count("train") == 2


async def test_trackers_learn_that_a_run_failed(tmp_path: Path, renderer: Renderer) -> None:
    feed = make_feed(tmp_path, {"jsonl": JsonlTracker()})
    with pytest.raises(Exception, match="step 1 "):
        await run(make_engine(tmp_path, renderer, trainer=ScriptedTrainer(fail_steps={1}), trackers=feed))
    assert lines(tmp_path / "tracked.jsonl")[-1] == {"call": "finish", "status": "failed"}
