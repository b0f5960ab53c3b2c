"""A short tracked run, and the same run resumed, as its trackers see it."""

from __future__ import annotations

from pathlib import Path

import anyio

from agentrl.observe.trackers.base import TrackedRun, Tracker
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.types import Trajectory
from tests.algo.build import episode, turn

BEGAN_AT = 1_700_000_000.0
HOSTILE = "```\n<script>alert(1)</script> | é \U0001f600"


def episodes() -> list[Trajectory]:
    return [episode([turn()], 1.0), episode([turn(), turn(reward=0.5, parent=0)], 0.0)]


def track(tracker: Tracker, run_dir: Path, *, resumed_step: int = 0) -> None:
    """Pass three steps after `resumed_step`, and an evaluation after the last of them, through a feed."""
    described = TrackedRun(
        name=run_dir.name,
        run_dir=run_dir,
        project="the-project",
        config={"name": run_dir.name, "trainer": {"lr": 1e-5}, "track": ["x"]},
        resumed_step=resumed_step,
        began_at=BEGAN_AT,
    )
    feed = TrackerFeed(
        {"real": tracker}, described, samples=3, decode=lambda ids: f"{HOSTILE} {len(ids)}", finish_timeout_s=500
    )

    async def follow() -> None:
        feed.start()
        for step in range(resumed_step + 1, resumed_step + 4):
            feed.step(step, 10.0 * step, {"step": step, "success_rate": step / 8, "trainer.loss": -0.5}, episodes())
        feed.evaluation(resumed_step + 3, 10.0 * resumed_step + 35, {"success_rate": 0.75, "greedy": True}, episodes())
        await feed.close("finished")

    anyio.run(follow)
