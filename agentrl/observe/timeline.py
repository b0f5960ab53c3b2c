"""The times of work and of waiting: `timeline.jsonl`, one line for each activity that ended.

Invariant: a line is written when its activity has ended by itself; one that is cut short leaves none. Waits shorter than
`MIN_WAIT_S` are left out. Times are on the run's clock, which continues over a resume; lines of work that a kill lost stay,
because the time was spent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

MIN_WAIT_S = 0.001
"""Seconds below which a wait has no line, so that waits that end at once do not fill the file."""

Actor: TypeAlias = Literal["trainer", "dispatcher", "servers", "evaluation"]
ActivityName: TypeAlias = Literal[
    "train",
    "wait_for_batch",
    "wait_for_servers",
    "wait_for_evaluation",
    "publish",
    "update",
    "pause",
    "wait_for_bound",
    "wait_for_slot",
    "checkpoint",
    "evaluate",
    "spot_check",
]


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `timeline.jsonl`.

    Example:
        >>> msgspec.json.encode(Activity(actor="trainer", activity="train", start_s=1.25, end_s=2.5, step=7)).decode()
        '{"actor":"trainer","activity":"train","start_s":1.25,"end_s":2.5,"step":7}'
    """

    actor: Actor
    """Who worked or waited."""
    activity: ActivityName
    """`update` is the time in which servers take new weights, `pause` the part of it in which they sample nothing."""
    start_s: float
    """Seconds on the run's clock."""
    end_s: float
    """Seconds on the run's clock."""
    step: int
    """The training step that was next to be finished; of an evaluation, the step after which it was asked for."""


def read_timeline(run_dir: str | Path) -> Iterator[Activity]:
    """Yield the activities of a run in the order in which they ended; half a line at the end is left out.

    A run without the file, such as one that has not begun, yields none.
    """
    decoder = msgspec.json.Decoder(Activity)
    path = Path(run_dir) / "timeline.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)
