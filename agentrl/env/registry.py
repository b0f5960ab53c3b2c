"""Find environments by name: `module:Name`, or the name of an installed one (entry points in `agentrl.environments`).

Invariant: looking an environment up imports its own module and nothing of the others.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from agentrl.env.pool import EnvironmentFactory
from agentrl.errors import ConfigError

ENTRY_POINT_GROUP = "agentrl.environments"


def installed_environments() -> dict[str, EntryPoint]:
    """Return the entry points of all installed environments by name; a name used twice is an error."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(f"two installed environments are called {entry.name}: {other.value} and {entry.value}")
    return found


def load_environment(spec: str, args: Mapping[str, Any] | None = None) -> EnvironmentFactory:
    """Return the factory of `module:Name`, or of an installed environment; `args` are passed for each instance.

    A class may refuse them now, with a ConfigError, by a `check_arguments` that takes the same.
    """
    where = f"environment {spec}"
    if ":" in spec:
        target = _imported(spec, where)
    else:
        installed = installed_environments()
        if spec not in installed:
            known = ", ".join(installed) or "none"
            raise ConfigError(
                f"{where}: expected module:Name or an installed environment ({known}); there is none of that name"
            )
        target = _imported(installed[spec].value, where)
    args = dict(args or {})
    try:
        inspect.signature(target).bind(**args)
    except TypeError as error:
        raise ConfigError(f"{where} does not take these arguments: {error}; got {args}") from None
    check: object = getattr(target, "check_arguments", None)
    if callable(check):
        check(**args)
    return cast("EnvironmentFactory", partial(target, **args))


def _imported(spec: str, where: str) -> Callable[..., object]:
    module, _, name = spec.partition(":")
    try:
        target = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise ConfigError(f"{where}: importing {module} failed: {error}") from error
    if not callable(target):
        raise ConfigError(f"{where}: module {module} has no class or function {name!r}")
    return target
