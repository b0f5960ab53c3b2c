"""Code of the user: the import of what a setting names as `module:name`, and the errors that the code raises.

Invariant: an import that fails is a `ConfigError` that begins with the setting.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from agentrl.errors import AgentRLError, ConfigError, EnvironmentFault, WorkflowError, is_cancellation
from agentrl.support.foreign import shortened, visible


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


@contextmanager
def boundary(kind: type[WorkflowError] | type[EnvironmentFault], where: str) -> Generator[None, None, None]:
    """Turn whatever user code raises into a `kind`; agentrl's own errors, cancellation and Ctrl-C pass unchanged.

    That includes `sys.exit`, the panic of a Rust library and the failure of a test framework, which are no `Exception`.

    Example:
        >>> with boundary(WorkflowError, "Calculator.run, task 17"):
        ...     {}["answer"]
        Traceback (most recent call last):
        ...
        agentrl.errors.WorkflowError: Calculator.run, task 17 raised KeyError: 'answer'
    """
    try:
        yield
    except AgentRLError:
        raise
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, GeneratorExit)) or is_cancellation(error):
            raise
        try:
            text = visible(shortened(str(error)))
        except Exception as failed:  # noqa: BLE001 - user code as well
            text = f"(its __str__ raised {type(failed).__name__})"
        raise kind(f"{where} raised {type(error).__name__}: {text}") from error
