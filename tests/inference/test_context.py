"""A context is its ids and their JSON, whoever made it."""

from __future__ import annotations

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TokenError
from agentrl.inference.backend import Context

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(IDS)
def test_ids_json_size_and_bound_say_the_same(ids: list[int]) -> None:
    context = Context.of(ids)
    assert context.ids().tolist() == ids
    assert context.ids().dtype == np.int32
    assert orjson.loads(b"[" + b"".join(context.json) + b"]") == ids
    assert (context.size, context.bound) == (len(ids), max(ids, default=-1) + 1)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_arrays_are_taken_as_lists_are(kind: type[np.generic]) -> None:
    assert Context.of(np.array([5, 6, 7], kind)) == Context.of([5, 6, 7])  # pyright: ignore[reportArgumentType] - as users do


def test_a_context_cannot_be_changed() -> None:
    context = Context.of([5, 6])
    with pytest.raises(AttributeError, match="immutable"):
        context.size = 1  # pyright: ignore[reportAttributeAccessIssue] - what must fail
    with pytest.raises(ValueError, match="read-only"):
        context.ids()[0] = 1


@pytest.mark.parametrize("ids", [5, [[1, 2]], [1.0], ["1"], [True], [None], [2**70]])
def test_what_is_no_list_of_whole_numbers_is_refused(ids: object) -> None:
    with pytest.raises(TokenError, match="a context is a list of token ids, got an array of"):
        Context.of(ids)  # pyright: ignore[reportArgumentType] - what must fail


@pytest.mark.parametrize("ids", [[3, -1], [2**31], [2**63]])
def test_ids_that_no_server_takes_are_refused_by_value(ids: list[int]) -> None:
    with pytest.raises(TokenError, match=rf"token ids must be in 0\.\.2147483647, got .*{ids[-1]}"):
        Context.of(ids)


def test_pieces_are_joined() -> None:
    whole = Context.of([5, 6, 7])
    pieces = msgspec.structs.replace(whole, packed=(whole.packed[0][:4], b"", whole.packed[0][4:]))
    assert pieces.ids().tolist() == [5, 6, 7]
