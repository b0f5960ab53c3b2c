"""A run of two steps for every family: servers, trainer, updates, spot checks and probes, as a user starts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import agentrl, records, write_run
from tests.support.families import HELD
from tests.support.families import family_checkpoint as checkpoint


@pytest.mark.starts
@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("method", ["disk", pytest.param("distributed", marks=pytest.mark.long)])
def test_a_run_of_two_steps_trains_on_exact_logprobs(tmp_path: Path, name: str, method: str) -> None:
    model = checkpoint(tmp_path / "model", name)
    write_run(tmp_path, model, sync={"method": method})
    done = agentrl(tmp_path, "train", "run.yaml", "--name", "r")
    assert done.returncode == 0, done.stderr
    metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
    steps, published = records(metrics, "step"), records(metrics, "published")
    assert len(steps) == 2
    # Spot checks recompute what servers sampled, probes what they compute after each update.
    assert max(step["trainer.max_spot_difference"] for step in steps) < 1e-5
    assert [one["version"] for one in published] == [1, 2, 3]
    for one in published:
        assert one["probe_difference"] < 1e-5
        assert set(one["server_digests"].values()) == {one["trainer_digest"]}
