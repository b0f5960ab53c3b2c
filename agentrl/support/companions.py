"""The packages beside this one, reached by name: nothing of `agentrl` imports a companion.

Invariant: a companion is imported when a run asks for something of it, never before. Installed packages join by entry
points of the groups below; where this package runs from a checkout that is not installed, its own companions are known.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from agentrl.errors import ConfigError

CompanionGroup: TypeAlias = Literal[
    "agentrl.commands", "agentrl.doctor", "agentrl.doors", "agentrl.model_files", "agentrl.splits", "agentrl.tasks"
]
ENTRY_POINTS: Final[Mapping[CompanionGroup, Mapping[str, str]]] = {
    "agentrl.commands": {
        "doors": "agentrl_doors.commands:COMMANDS",
        "gguf": "agentrl_gguf.commands:COMMANDS",
        "sandbox": "agentrl_sandbox.hosts:COMMANDS",
        "simulate": "agentrl_simulate.plan:COMMANDS",
        "testing": "agentrl_testing.commands:COMMANDS",
        "viewer": "agentrl_viewer.commands:COMMANDS",
    },
    "agentrl.doctor": {"sandbox": "agentrl_sandbox.doctor:check_sandbox"},
    "agentrl.doors": {"http": "agentrl_doors.gateway.sessions:open_door"},
    "agentrl.model_files": {"gguf": "agentrl_gguf.cached:GGUF"},
    "agentrl.splits": {"formula": "agentrl_simulate.plan.planner:FORMULA_PLANNER"},
    "agentrl.tasks": {"harbor": "agentrl_sandbox.harbor.task:harbor_tasks"},
}
"""The entry points of the packages that are built with this one, as in pyproject.toml."""


class Command(NamedTuple):
    """A command of the command line that is not imported yet."""

    place: str
    """`module:function`."""
    summary: str
    """The first sentence of its help."""


class ModelFile(NamedTuple):
    """A format in which a whole model is one file; the group `agentrl.model_files` has them by the ends of names."""

    config: Callable[[str], Mapping[str, Any]]
    """Returns config.json from the file's header alone; a ConfigError says why it cannot be imported here."""
    directory: Callable[[str], Path]
    """Returns a Hugging Face directory, which it makes where it has none yet."""


def companion_names(group: CompanionGroup) -> list[str]:
    """Return the names of all that joined a group, sorted."""
    return sorted(_places(group))


def load_companion(group: CompanionGroup, name: str) -> object:
    """Import and return what joined a group by a name.

    Raises:
        ConfigError: nothing did, or importing it failed.
    """
    places = _places(group)
    if name not in places:
        raise ConfigError(f"no installed package offers {name!r} as {group}; there is {', '.join(places) or 'none'}")
    module, _, attribute = places[name].partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{group}: importing {places[name]} for {name!r} failed: {error}") from error


def _places(group: CompanionGroup) -> dict[str, str]:
    return {**ENTRY_POINTS[group], **{entry.name: entry.value for entry in entry_points(group=group)}}
