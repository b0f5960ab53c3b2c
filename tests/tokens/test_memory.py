"""What the graphs of running episodes hold."""

from __future__ import annotations

import pytest

from benchmarks.memory import measure


@pytest.mark.parametrize("turns", [10, 32])
def test_graphs_but_for_the_conversations_own_text_stay_within_24_megabytes_for_256_episodes_of_4096_tokens(turns: int):
    found = measure(16, 4096, turns)
    assert found["arrays_bytes_per_token"] <= 8
    assert found["graphs_without_conversation_text_mb"] * 256 / 16 <= 24
