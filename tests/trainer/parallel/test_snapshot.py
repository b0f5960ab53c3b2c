"""Copies of whole weights on rank 0, in memory and in a file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from agentrl.errors import TrainError
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.snapshot import snapshot

TENSORS = {
    "matrix": torch.arange(15, dtype=torch.float32).reshape(3, 5) / 7,
    "one": torch.tensor(1.5),
    "none": torch.empty(0, 4),
    "half": torch.arange(7, dtype=torch.float16),
}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_copies_in_a_file_have_every_bit_of_those_in_memory_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    found, wanted = snapshot(tensors, Ranks(), dtype=dtype, in_file=True), snapshot(tensors, Ranks(), dtype=dtype)
    tensors["matrix"].zero_()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, wanted[name])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_weights_is_an_error_that_names_the_fix() -> None:
    huge = {"matrix": torch.empty(1 << 30, 1 << 30, device="meta")}
    with pytest.raises(TrainError, match=r"no room for .* GiB of weights .*; set TMPDIR to a directory on a disk"):
        snapshot(huge, Ranks(), in_file=True)
