"""The real TensorBoard reads back what the tracker wrote."""
# The package is optional and its types are not ours: what it returns is checked at run time.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
# pyright: reportOperatorIssue=false, reportUnhashable=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.observe.trackers.to_tensorboard import TensorBoardTracker
from tests.observe.trackers.scene import BEGAN_AT, HOSTILE, track

pytestmark = pytest.mark.external


def test_curves_texts_and_a_resumed_run_are_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    track(TensorBoardTracker(), tmp_path)
    track(TensorBoardTracker(), tmp_path, resumed_step=2)
    read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    read.Reload()
    rates = read.Scalars("train/success_rate")
    assert [(one.step, one.value) for one in rates] == [(step, step / 8) for step in range(1, 6)]
    assert rates[0].wall_time == BEGAN_AT + 10
    assert [one.step for one in read.Scalars("eval/success_rate")] == [5]
    assert {"training/best", "training/worst", "evaluation/best", "evaluation/worst", "config"} <= set(
        read.Tags()["tensors"]
    )
    [text] = read.Tensors("evaluation/best")[-1].tensor_proto.string_val
    assert all(f"    {line}" in text.decode() for line in HOSTILE.splitlines())
    assert "tracker" not in caplog.text
