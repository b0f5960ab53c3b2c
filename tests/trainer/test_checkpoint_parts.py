"""The parts of a tensor in a checkpoint make it up exactly, or the reader names the file before anything is loaded."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TrainError
from agentrl.trainer.checkpoints.format import (
    SHARDS_FILE,
    STATE_FILE,
    CheckpointRecord,
    FileRecord,
    ShardIndex,
    SliceRecord,
    TensorRecord,
    TrainerState,
)
from agentrl.trainer.checkpoints.read import read_checkpoint
from agentrl.trainer.checkpoints.write import CheckpointJob, StagedParts, write_checkpoint
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.weights.tensors import Index, RawTensor, TensorPart

_MOST = 5


@st.composite
def cut_tensors(draw: st.DrawFn) -> TensorRecord:
    """Return a tensor of up to three dimensions, cut again and again along one of them."""
    whole: Index = tuple(draw(st.lists(st.integers(1, _MOST), max_size=3)))
    boxes: list[tuple[Index, Index]] = [((0,) * len(whole), whole)]
    for _ in range(draw(st.integers(0, 6))):
        offset, shape = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, max(0, len(whole) - 1)))
        if len(whole) and shape[axis] > 1:
            at = draw(st.integers(1, shape[axis] - 1))
            boxes.append((offset, (*shape[:axis], at, *shape[axis + 1 :])))
            moved = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
            boxes.append((moved, (*shape[:axis], shape[axis] - at, *shape[axis + 1 :])))
        else:
            boxes.append((offset, shape))
    order = draw(st.permutations(boxes))
    slices = tuple(SliceRecord(f"file-{number}", *box) for number, box in enumerate(order))
    return TensorRecord("F32", whole, slices)


def _problem(tensor: TensorRecord, *slices: SliceRecord) -> str | None:
    return ShardIndex({}, {"exp_avg.w": msgspec.structs.replace(tensor, slices=slices)}).problem()


@given(cut_tensors())
def test_parts_that_make_up_a_tensor_have_no_problem(tensor: TensorRecord) -> None:
    assert _problem(tensor, *tensor.slices) is None


@given(cut_tensors(), st.data())
def test_a_part_that_is_missing_twice_there_or_moved_is_named(tensor: TensorRecord, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(tensor.slices) - 1))
    part, rest = tensor.slices[number], [*tensor.slices[:number], *tensor.slices[number + 1 :]]
    missing = math.prod(tensor.shape) - math.prod(part.shape)
    assert f"have {missing} of {math.prod(tensor.shape)} elements" in str(_problem(tensor, *rest))

    twice = _problem(tensor, *tensor.slices, msgspec.structs.replace(part, file="again"))
    assert twice is not None
    assert "again" in twice
    assert "overlaps" in twice

    if tensor.shape:
        axis = data.draw(st.integers(0, len(tensor.shape) - 1))
        by = data.draw(st.integers(-_MOST, _MOST).filter(bool))
        offset = (*part.offset[:axis], part.offset[axis] + by, *part.offset[axis + 1 :])
        moved = msgspec.structs.replace(part, offset=offset)
        problem = _problem(tensor, *rest, moved)
        assert problem is not None
        is_within = 0 <= offset[axis] <= tensor.shape[axis] - part.shape[axis]
        assert ("overlaps" if is_within else f"the part of {part.file} at {offset}") in problem
        assert is_within or problem.endswith("is outside the tensor")


@given(cut_tensors(), st.data())
def test_what_is_accepted_covers_each_element_once(tensor: TensorRecord, data: st.DataObject) -> None:
    numbers = st.integers(-1, _MOST)
    boxes = st.tuples(*(st.tuples(numbers, numbers) for _ in tensor.shape))
    chosen = [data.draw(boxes) if data.draw(st.booleans()) else None for _ in tensor.slices]
    slices = [
        part if box is None else SliceRecord(part.file, tuple(at for at, _ in box), tuple(size for _, size in box))
        for part, box in zip(tensor.slices, chosen, strict=True)
    ]
    counts = np.zeros(tensor.shape, int)
    is_within = True
    for part in slices:
        is_within &= all(
            a >= 0 and n >= 0 and a + n <= end for a, n, end in zip(part.offset, part.shape, tensor.shape, strict=True)
        )
        if is_within:
            counts[tuple(slice(a, a + n) for a, n in zip(part.offset, part.shape, strict=True))] += 1
    assert (_problem(tensor, *slices) is None) == (is_within and bool((counts == 1).all()))


def test_the_reader_names_file_and_tensor_and_reads_nothing(tmp_path: Path) -> None:
    raw = RawTensor.of(np.arange(8, dtype=np.float32))
    part = TensorPart(whole=(8,), offset=(0,), data=raw)
    state = TrainerState(policy_version=1, steps=1, optimizer_steps=1, bad_steps=0)
    parts = StagedParts(weights={"w": part}, optimizer={"exp_avg.w": part})
    folder = tmp_path / "step-1"
    write_checkpoint(Ranks(), CheckpointJob(directory=folder, parts=parts, state=state, note="", source=tmp_path))
    index = msgspec.json.decode((folder / SHARDS_FILE).read_bytes(), type=ShardIndex)
    [stored] = index.weights["w"].slices
    broken = msgspec.structs.replace(index.weights["w"], slices=(stored, stored))
    changed = msgspec.json.encode(msgspec.structs.replace(index, weights={"w": broken}))
    (folder / SHARDS_FILE).write_bytes(changed)
    record = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=CheckpointRecord)
    files = record.files | {SHARDS_FILE: FileRecord.of(folder / SHARDS_FILE)}
    record = msgspec.structs.replace(record, files=files)
    signed = msgspec.structs.replace(record, digest=record.own_digest)
    (folder / STATE_FILE).write_bytes(msgspec.json.encode(signed))

    message = r"step-1 is damaged: w \(8,\): the part of model\.safetensors at \(0,\) of shape \(8,\) overlaps"
    with pytest.raises(TrainError, match=message):
        read_checkpoint(folder)
