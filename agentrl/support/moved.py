"""Modules that stood elsewhere until version 0.2: their former names work for one release.

Invariant: a former name is the same module as the new one, and its first import warns.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "agentrl.algo.advantage": "agentrl.algo.batch_advantages",
    "agentrl.algo.advantages.players": "agentrl.algo.advantages.parts",
    "agentrl.algo.companions": "agentrl.algo.config",
    "agentrl.algo.corrections.correction_options": "agentrl.algo.corrections",
    "agentrl.algo.corrections.proximal": "agentrl.algo.corrections",
    "agentrl.algo.corrections.segments": "agentrl.algo.corrections",
    "agentrl.algo.corrections.tokens": "agentrl.algo.corrections",
    "agentrl.algo.filled": "agentrl.algo.config",
    "agentrl.algo.keeps": "agentrl.algo.group_slots",
    "agentrl.algo.losses.clipped": "agentrl.algo.losses",
    "agentrl.algo.losses.loss_options": "agentrl.algo.losses",
    "agentrl.algo.losses.weighted": "agentrl.algo.losses",
    "agentrl.algo.shaped_groups": "agentrl.algo.group_slots",
    "agentrl.algo.terms.critics": "agentrl.algo.terms",
    "agentrl.algo.terms.penalties": "agentrl.algo.terms",
    "agentrl.algo.terms.term_options": "agentrl.algo.terms",
    "agentrl.cassette": "agentrl.episode.tape",
    "agentrl.concurrency": "agentrl.support.concurrency",
    "agentrl.exact_json": "agentrl.support.exact_json",
    "agentrl.exchange": "agentrl_viewer.exchange",
    "agentrl.files": "agentrl.support.files",
    "agentrl.folders": "agentrl.support.folders",
    "agentrl.foreign": "agentrl.support.foreign",
    "agentrl.gateway": "agentrl_doors.gateway",
    "agentrl.online": "agentrl_doors.online",
    "agentrl.reward": "agentrl_rewards",
    "agentrl.runs": "agentrl.observe.runs",
    "agentrl.runs.run": "agentrl.commands.open_run",
    "agentrl.sandbox": "agentrl_sandbox",
    "agentrl.simulate": "agentrl_simulate",
    "agentrl.testing": "agentrl_testing",
    "agentrl.tools": "agentrl.client.tools",
    "agentrl.user_code": "agentrl.support.user_code",
    "agentrl.view": "agentrl_viewer.view",
    "agentrl.watchdog": "agentrl.processes.watchdog",
}
"""The present names of packages and modules, by their former ones; that of the nearest counts for those inside."""


def present_name(name: str) -> str | None:
    """Return the present name of a module; None where it has not moved.

    Example:
        >>> present_name("agentrl.reward.match"), present_name("agentrl.env")
        ('agentrl_rewards.match', None)
    """
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        former = ".".join(parts[:length])
        if former in MOVED:
            return MOVED[former] + name.removeprefix(former)
    return None


class MovedModules(MetaPathFinder, Loader):
    """Finds modules by their former names."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if present_name(fullname) is None else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = present_name(spec.name)
        assert name is not None
        warnings.warn(f"{spec.name} is {name} now; the former name ends with the next release", FutureWarning, stacklevel=2)
        module = importlib.import_module(name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is, with the specification of its present name, which the import system has replaced."""
        former = module.__spec__
        assert former is not None
        module.__spec__ = former.loader_state


def find_moved_modules() -> None:
    """Let former names be imported from here on."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())  # before a file is found below a former name, as a second module
