"""`track: [jsonl]`: what trackers get, as JSON lines in `tracked.jsonl`, for other programs and as the pattern of a tracker.

Invariant: one line for each call, in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from agentrl.episode.summary import Purpose
from agentrl.observe.records import JsonLines
from agentrl.observe.trackers.base import RunStatus, SampledEpisode, TrackedRun, Tracker


class JsonlTracker(Tracker):
    """Writes `tracked.jsonl` in the run directory."""

    def start(self, run: TrackedRun) -> None:
        self._lines = JsonLines(run.run_dir / "tracked.jsonl")
        self._lines.append({"call": "start", "name": run.name, "project": run.project, "resumed_step": run.resumed_step})

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        self._lines.append({"call": "step", "step": step, "wall_s": wall_s, "numbers": numbers})

    def evaluation(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        self._lines.append({"call": "evaluation", "step": step, "wall_s": wall_s, "numbers": numbers})

    def episodes(self, step: int, purpose: Purpose, samples: Sequence[SampledEpisode]) -> None:
        chosen = [asdict(sample) for sample in samples]
        self._lines.append({"call": "episodes", "step": step, "purpose": purpose, "episodes": chosen})

    def finish(self, status: RunStatus) -> None:
        self._lines.append({"call": "finish", "status": status})
        self._lines.close()
