"""What is looked at one by one, or as an array, passes or fails alike."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl.episode.checks import sound_logprobs

VALUES = st.one_of(
    st.floats(max_value=0, allow_infinity=False, allow_nan=False, width=32),
    st.sampled_from([0.0, -0.0, 5e-5, 2e-4, 1.0, math.nan, math.inf, -math.inf, -3.4e38]),
)


@given(values=st.lists(VALUES, min_size=1, max_size=80))
@example([-1.0] * 40 + [math.nan])
@example([math.nan, -1.0])
@example([-3.4e38] * 32)
@example([-3.4e38] * 33)
def test_logprobs_are_sound_if_all_are_finite_and_none_is_positive(values: list[float]):
    expected = all(math.isfinite(value) and value <= 1e-4 for value in values)
    assert sound_logprobs(np.array(values, np.float32)) is expected
