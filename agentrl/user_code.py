"""Import what a setting names as `module:name`, from the current directory or the installed packages.

Invariant: every failure is a `ConfigError` that begins with the setting.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from agentrl.errors import ConfigError


def import_user_module(name: str, field: str = "workflow") -> ModuleType:
    """Return a module of the user, which may be in the current directory; `field` names it in messages."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{field}: there is no module {name!r}; looked in {here} and the installed packages"
            ) from error
        raise ConfigError(f"{field}: module {name!r} needs {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{field}: importing {name!r} raised {type(error).__name__}: {error}") from error


def import_user_object(spec: str, field: str) -> object:
    """Return the object `module:name`; `field` names the setting in messages."""
    module, colon, name = spec.partition(":")
    if not (module and colon and name):
        raise ConfigError(f"{field}: expected module:name, such as my_agent:helper, got {spec!r}")
    try:
        return getattr(import_user_module(module, field), name)
    except AttributeError:
        raise ConfigError(f"{field}: module {module} has no {name!r}") from None
