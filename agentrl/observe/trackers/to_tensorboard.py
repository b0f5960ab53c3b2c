"""`track: [tensorboard]`: an event file in `tensorboard/` of the run directory; `tensorboard --logdir runs` shows all runs.

Invariant: a step of a resumed run replaces what an earlier process wrote for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentrl.episode.summary import Purpose
from agentrl.observe.trackers.base import RunStatus, SampledEpisode, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Writes scalars and texts, without TensorFlow or torch."""

    def start(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore
        from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
            EventFileWriter,
        )

        self._event = Event
        self._began_at = run.began_at
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"), flush_secs=10)
        if run.resumed_step:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(session_log=start, step=run.resumed_step + 1, wall_time=run.began_at))
        self._add_text("config", 0, 0.0, json.dumps(run.config, indent=2))

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Write scalars `train/KEY`."""
        self._add_scalars("train", step, wall_s, numbers)

    def evaluation(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Write scalars `eval/KEY`."""
        self._add_scalars("eval", step, wall_s, numbers)

    def episodes(self, step: int, purpose: Purpose, samples: Sequence[SampledEpisode]) -> None:
        """Write texts `PURPOSE/CHOICE`."""
        seen = {"best": 0, "worst": 0, "random": 0}
        for sample in samples:
            seen[sample.choice] += 1
            number = "" if seen[sample.choice] == 1 else f"-{seen[sample.choice]}"
            self._add_text(f"{purpose}/{sample.choice}{number}", step, None, sample.text)

    def finish(self, status: RunStatus) -> None:
        self._add_text("status", 0, None, status)
        self._writer.close()

    def _add_scalars(self, group: str, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        self._last_s = wall_s
        values = [Summary.Value(tag=f"{group}/{key}", simple_value=number) for key, number in numbers.items()]
        self._writer.add_event(self._event(summary=Summary(value=values), step=step, wall_time=self._began_at + wall_s))

    def _add_text(self, tag: str, step: int, wall_s: float | None, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
        from tensorboard.plugins.text.metadata import create_summary_metadata  # pyright: ignore[reportMissingImports]
        from tensorboard.util.tensor_util import make_tensor_proto  # pyright: ignore[reportMissingImports]

        self._last_s = self._last_s if wall_s is None else wall_s
        verbatim = "\n".join(f"    {line}" for line in text.splitlines())  # the page renders Markdown
        metadata = create_summary_metadata(display_name=tag, description="")
        value = Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto([verbatim], dtype="string"))
        wall_time = self._began_at + self._last_s
        self._writer.add_event(self._event(summary=Summary(value=[value]), step=step, wall_time=wall_time))
