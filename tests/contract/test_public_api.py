"""The names a user learns."""

from __future__ import annotations

import agentrl


def test_the_top_level_has_at_most_twenty_names_and_each_exists() -> None:
    assert len(agentrl.__all__) <= 20
    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None
