"""Modules that moved are found by their former names, as the same modules, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

from agentrl.support.moved import MOVED, present_name


@pytest.mark.parametrize(
    "former", [*MOVED, "agentrl.reward.match", "agentrl.sandbox.types", "agentrl.testing.playing", "agentrl.runs.reading"]
)
def test_a_former_name_is_the_same_module_and_warns(former: str) -> None:
    sys.modules.pop(former, None)
    with pytest.warns(FutureWarning, match=f"{former} is {present_name(former)} now"):
        found = importlib.import_module(former)
    now = importlib.import_module(str(present_name(former)))
    assert found is now
    assert now.__spec__ is not None
    assert (now.__name__, now.__spec__.name) == (present_name(former), present_name(former))


def test_what_never_was_there_is_still_not_found() -> None:
    for name in ("agentrl.rewards", "agentrl.nothing"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)
