"""Runs of two steps in each type of server and trainer, by each way of training and of moving weights, then audited."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.cli import status_here, write_run
from tests.support.tiny import tiny_checkpoint

FULL: dict[str, Any] = {}
MERGED: dict[str, Any] = {"trainer.lora": {"rank": 2, "alpha": 4}}
ADAPTER: dict[str, Any] = {**MERGED, "sync.adapter": "adapter"}
DISK: dict[str, Any] = {"sync.method": "disk"}
GROUP: dict[str, Any] = {"sync.method": "distributed"}
BFLOAT16: dict[str, Any] = {"trainer.dtype": "bfloat16"}
COARSE_SERVER: dict[str, Any] = {"inference.dtype": "bfloat16"}
COARSE_TRAINER: dict[str, Any] = {"trainer.dtype": "bfloat16", "inference.dtype": "float32"}
HERE = {"backend": "embedded", "device": "cpu", "max_context_tokens": 256, "max_running_requests": 16}
SGLANG = {
    "backend": "sglang", "device": "cpu", "max_context_tokens": 256, "max_running_requests": 16,
    "start_timeout_s": 600, "health_interval_s": 60, "sglang_args": ["--max-total-tokens", "8192"],
}  # fmt: skip
long, nightly, sglang = pytest.mark.long, pytest.mark.nightly, pytest.mark.sglang


def cell(name: str, *parts: dict[str, Any], dp: int = 1, marks: Sequence[pytest.MarkDecorator] = ()) -> ParameterSet:
    fields: dict[str, Any] = {"trainer.parallel.dp": dp}
    for part in parts:
        fields |= part
    return pytest.param(fields, id=f"{name}-dp{dp}", marks=marks)


CELLS = [
    cell("full-disk", FULL, DISK, BFLOAT16),
    cell("adapter-disk", ADAPTER, BFLOAT16),
    cell("merged-group", MERGED, GROUP, BFLOAT16, dp=2),
    cell("full-group", FULL, GROUP, BFLOAT16, dp=2, marks=[long]),
    cell("merged-disk", MERGED, DISK, BFLOAT16, marks=[long]),
    cell("full-disk-server", FULL, DISK, COARSE_SERVER, marks=[long]),
    cell("adapter-disk-server", ADAPTER, COARSE_SERVER, marks=[long]),
    cell("full-group-trainer", FULL, GROUP, COARSE_TRAINER, marks=[long]),
    cell("full-disk", FULL, DISK, BFLOAT16, dp=2, marks=[nightly]),
    cell("full-group", FULL, GROUP, BFLOAT16, marks=[nightly]),
    cell("merged-disk", MERGED, DISK, BFLOAT16, dp=2, marks=[nightly]),
    cell("merged-group", MERGED, GROUP, BFLOAT16, marks=[nightly]),
    cell("adapter-disk", ADAPTER, BFLOAT16, dp=2, marks=[nightly]),
    cell("merged-disk-server", MERGED, DISK, COARSE_SERVER, marks=[nightly]),
    cell("full-group-server", FULL, GROUP, COARSE_SERVER, marks=[nightly]),
    cell("full-disk-trainer", FULL, DISK, COARSE_TRAINER, marks=[nightly]),
    cell("adapter-disk-trainer", ADAPTER, COARSE_TRAINER, marks=[nightly]),
]
REAL = [
    cell("full-disk", FULL, DISK, BFLOAT16, marks=[sglang]),
    cell("full-group", FULL, GROUP, BFLOAT16, dp=2, marks=[sglang]),
    cell("merged-group", MERGED, GROUP, BFLOAT16, marks=[sglang]),
    cell("adapter-disk", ADAPTER, BFLOAT16, dp=2, marks=[sglang]),
    cell("full-disk", FULL, DISK, BFLOAT16, dp=2, marks=[sglang, nightly]),
    cell("full-group", FULL, GROUP, BFLOAT16, marks=[sglang, nightly]),
    *[cell("merged-disk", MERGED, DISK, BFLOAT16, dp=dp, marks=[sglang, nightly]) for dp in (1, 2)],
    cell("merged-group", MERGED, GROUP, BFLOAT16, dp=2, marks=[sglang, nightly]),
    cell("adapter-disk", ADAPTER, BFLOAT16, marks=[sglang, nightly]),
    cell("full-disk-server", FULL, DISK, COARSE_SERVER, marks=[sglang, nightly]),
]
"""Each way once and, marked `nightly`, the rest, which `CELLS=short` leaves out."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), spread=0.1)


def train_and_audit(folder: Path, checkpoint: Path, inference: dict[str, Any], fields: dict[str, Any]) -> None:
    run = write_run(folder, checkpoint, inference=inference)
    given = [word for name, value in fields.items() for word in (f"--{name}", json.dumps(value))]
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert status_here("train", str(run), *given) == 0
        assert status_here("audit", "runs/small") == 0
    finally:
        os.chdir(before)
    events = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
    published = [event for event in events if event["event"] == "published"]
    assert [event["version"] for event in published] == [1, 2, 3]
    assert len({event["trainer_digest"] for event in published}) == 3
    assert [event["loss_tokens"] > 0 for event in events if event["event"] == "step"] == [True, True]


@pytest.mark.starts
@pytest.mark.parametrize("fields", CELLS)
def test_two_steps_pass_their_audit(tmp_path: Path, checkpoint: Path, fields: dict[str, Any]) -> None:
    train_and_audit(tmp_path, checkpoint, HERE, fields)


@pytest.mark.starts
@pytest.mark.parametrize("fields", REAL)
def test_two_steps_with_a_real_sglang_pass_their_audit(tmp_path: Path, checkpoint: Path, fields: dict[str, Any]) -> None:
    train_and_audit(tmp_path, checkpoint, SGLANG, fields)
