"""`track: [mlflow]`: a run of MLflow, in a local SQLite store beside the runs unless `MLFLOW_TRACKING_URI` names another.

Invariant: nothing is sent over the network unless that variable asks for it. A resumed run continues the same MLflow run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agentrl.episode.summary import Purpose
from agentrl.observe.trackers.base import RunStatus, SampledEpisode, TrackedRun, Tracker
from agentrl.types import JsonValue

_STATUS: Mapping[RunStatus, str] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MAX_VALUE = 500
"""Characters of a parameter: the limit of older servers."""


class MlflowTracker(Tracker):
    """Logs metrics, the fields of the run file as parameters, and episodes as text artifacts."""

    def start(self, run: TrackedRun) -> None:
        """Open the run that an earlier process began, or create one in the experiment of the project."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at the import: it sends usage data
        logging.getLogger("alembic").setLevel(logging.WARNING)
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        runs_dir = run.run_dir.resolve().parent
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._began_at = run.began_at
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{runs_dir / 'mlflow.db'}")
        file = run.run_dir / "mlflow-id.txt"
        if file.is_file():
            self._id = file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._experiment(run.project, None if uri else runs_dir / "mlflow-artifacts")
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        file.write_text(self._id)
        for name, value in _flat(run.config):
            self._client.log_param(self._id, name, value[:_MAX_VALUE])

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Log `train/KEY`."""
        self._log("train", step, wall_s, numbers)

    def evaluation(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Log `eval/KEY`."""
        self._log("eval", step, wall_s, numbers)

    def episodes(self, step: int, purpose: Purpose, samples: Sequence[SampledEpisode]) -> None:
        """Log a text artifact `episodes/PURPOSE/step-NUMBER.txt`."""
        text = "\n\n".join(f"===== {sample.choice} =====\n{sample.text}" for sample in samples)
        self._client.log_text(self._id, text, f"episodes/{purpose}/step-{step:06d}.txt")

    def finish(self, status: RunStatus) -> None:
        self._client.set_terminated(self._id, status=_STATUS[status])

    def _experiment(self, name: str, artifacts: Path | None) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        return self._client.create_experiment(name, artifact_location=None if artifacts is None else artifacts.as_uri())

    def _log(self, group: str, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        at = round(1000 * (self._began_at + wall_s))
        metrics = [Metric(f"{group}/{key}", value, at, step) for key, value in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)


def _flat(values: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
