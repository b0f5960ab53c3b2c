"""The names a user learns."""

from __future__ import annotations

import pkgutil

import agentrl


def test_the_top_level_has_at_most_thirty_names_and_each_exists() -> None:
    assert len(agentrl.__all__) <= 30
    for name in agentrl.__all__:
        assert getattr(agentrl, name) is not None


def test_no_name_is_that_of_a_module_which_would_take_its_place_once_it_is_imported() -> None:
    assert {module.name for module in pkgutil.iter_modules(agentrl.__path__)}.isdisjoint(agentrl.__all__)
