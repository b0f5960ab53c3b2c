"""What the graphs of running episodes hold."""

from __future__ import annotations

import pytest

from benchmarks.memory import measure


@pytest.mark.parametrize(("turns", "megabytes"), [(10, 20), (32, 28)])
def test_graphs_of_256_episodes_of_4096_tokens_stay_small_beside_the_text_of_their_conversations(turns: int, megabytes: int):
    found = measure(16, 4096, turns)
    assert found["arrays_bytes_per_token"] <= 8
    assert found["graphs_without_conversation_text_mb"] * 256 / 16 <= megabytes
