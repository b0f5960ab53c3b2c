"""Packed fields give back what they were given."""

from __future__ import annotations

import copy
import sys
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.types import Int32Array, opened, packed


@packed(ids=np.int32)
@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    ids: Int32Array
    name: str = ""


@given(values=st.lists(st.integers(-(2**31), 2**31 - 1)), start=st.integers(0, 3))
def test_values_come_back_in_the_declared_type(values: list[int], start: int):
    whole = np.array(values, np.int32)
    over_bytes = np.frombuffer(whole.tobytes(), np.int32)
    arrays: list[Any] = [whole, whole.astype(np.int64), whole[start:], whole[::2], over_bytes, over_bytes[start:]]
    for array in arrays:
        record = replace(Record(ids=array, name="a"), name="b")
        for kept in (record, copy.deepcopy(record)):
            assert kept.ids.dtype == np.int32
            assert kept.ids.tolist() == array.tolist()


def test_a_record_does_not_follow_the_array_it_was_given():
    array = np.array([1, 2], np.int32)
    record = Record(ids=array)
    array[0] = 9
    assert record.ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        record.ids[0] = 9


def test_an_array_over_whole_bytes_is_shared():
    data = np.arange(1000, dtype=np.int32).tobytes()
    before = sys.getrefcount(data)
    records = [Record(ids=np.frombuffer(data, np.int32)) for _ in range(3)]
    assert sys.getrefcount(data) == before + len(records)


def written(**fields: object) -> Record:
    made: Any = opened(Record)()
    for name, value in fields.items():
        setattr(made, name, value)
    made.__class__ = Record
    return made


def test_a_record_written_open_is_the_one_its_class_makes():
    array = np.array([1, -2], np.int32)
    made = written(ids=array.tobytes(), name="a")
    expected = Record(ids=array, name="a")
    assert type(made) is Record
    assert (made.ids.tolist(), made.ids.dtype, made.name) == (expected.ids.tolist(), expected.ids.dtype, expected.name)
    assert repr(made) == repr(expected)
    assert replace(made, name="b").ids.tolist() == [1, -2]
    with pytest.raises(FrozenInstanceError):
        made.name = "b"  # pyright: ignore[reportAttributeAccessIssue]


def test_only_the_fields_of_a_record_can_be_written():
    with pytest.raises(AttributeError, match="size"):
        written(size=3)
