"""Models that tensor parallelism cannot split are refused with the numbers that work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.trainer.parallel.shape import check_context_fit, check_tensor_fit

_SIZES = st.integers(min_value=1, max_value=64)


@given(tp=_SIZES, kv_heads=_SIZES, group=_SIZES, intermediate=_SIZES)
def test_a_model_fits_where_every_rank_gets_as_many_heads_and_features(
    tp: int, kv_heads: int, group: int, intermediate: int
) -> None:
    heads = kv_heads * group
    fits = kv_heads % tp == 0 and intermediate % tp == 0
    try:
        check_tensor_fit(tp, architecture="qwen3", heads=heads, kv_heads=kv_heads, intermediate=intermediate)
    except ConfigError as error:
        assert not fits
        usable = [int(word) for word in str(error).partition("; use ")[2].replace(" or", ",").split(",")]
        for ways in usable:
            check_tensor_fit(ways, architecture="qwen3", heads=heads, kv_heads=kv_heads, intermediate=intermediate)
    else:
        assert fits


def test_an_unknown_architecture_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="a gpt2 model cannot be split; expected one of llama, qwen2, qwen3"):
        check_tensor_fit(2, architecture="gpt2", heads=4, kv_heads=4, intermediate=64)


def test_one_rank_needs_no_known_architecture() -> None:
    check_tensor_fit(1, architecture="gpt2", heads=3, kv_heads=1, intermediate=7)


@given(cp=_SIZES, tp=_SIZES, own=_SIZES)
def test_sequences_are_cut_where_every_rank_gets_as_many_heads(cp: int, tp: int, own: int) -> None:
    if own % cp == 0:
        check_context_fit(cp, tp=tp, heads=own * tp)
    else:
        with pytest.raises(ConfigError, match=rf"cp: {cp} does not divide the {own} query heads of a rank; use 1"):
            check_context_fit(cp, tp=tp, heads=own * tp)
