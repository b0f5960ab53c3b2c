"""The real MLflow reads back what the tracker wrote into a local store."""
# The package is optional and its types are not ours: what it returns is checked at run time.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
# pyright: reportOperatorIssue=false, reportUnhashable=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.observe.trackers.to_mlflow import MlflowTracker
from tests.observe.trackers.scene import HOSTILE, track

pytestmark = [pytest.mark.external, pytest.mark.filterwarnings("default")]  # those of MLflow's own code are not ours


def test_curves_texts_and_a_resumed_run_are_read_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = tmp_path / "runs" / "first"
    run_dir.mkdir(parents=True)
    track(MlflowTracker(), run_dir)
    track(MlflowTracker(), run_dir, resumed_step=3)
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("the-project")
    [run] = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["trainer.lr"] == "1e-05"
    rates = client.get_metric_history(run.info.run_id, "train/success_rate")
    assert sorted((one.step, one.value) for one in rates) == [(step, step / 8) for step in range(1, 7)]
    assert sorted(one.step for one in client.get_metric_history(run.info.run_id, "eval/success_rate")) == [3, 6]
    folder = client.download_artifacts(run.info.run_id, "episodes/evaluation", str(tmp_path))
    assert HOSTILE.splitlines()[1] in (Path(folder) / "step-000003.txt").read_text()
    assert "tracker" not in caplog.text
