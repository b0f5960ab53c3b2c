"""Values of task.toml that are checked one by one; an error names the field and the fix."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError

_TEMPLATE: Final = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])", re.IGNORECASE)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNIT_MB: Final = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def field_error(folder: Path, field: str, why: str) -> ConfigError:
    """Return the error for a field of task.toml."""
    return ConfigError(f"{folder}: {field}: {why}; leave the task out, or change the field")


def check_env(folder: Path, field: str, env: Mapping[str, str]) -> None:
    """Check the variables of a field: names, and values that ask nothing of this machine."""
    for name, value in env.items():
        if _NAME.fullmatch(name) is None:
            raise field_error(folder, field, f"expected a name of letters, digits and underscores, got {name!r}")
        if "\0" in value:
            raise field_error(folder, f"{field}.{name}", f"expected no zero byte, got {value!r}")
        if _TEMPLATE.search(value):
            raise field_error(folder, f"{field}.{name}", f"{value!r} asks for a variable of this machine, which stays out")


def checked_seconds(folder: Path, field: str, value: float | None) -> float | None:
    """Return a number of seconds, if it is one."""
    if value is not None and not 0 < value <= 86_400:
        raise field_error(folder, field, f"expected seconds above 0, at most a day, got {value!r}")
    return value


def checked_cpus(folder: Path, value: float | None) -> float | None:
    """Return a number of processors, if it is one."""
    if value is not None and not 0 < value < math.inf:
        raise field_error(folder, "environment.cpus", f"expected a number above 0, got {value!r}")
    return value


def checked_size(folder: Path, field: str, mebibytes: int | None, text: str | None) -> int | None:
    """Return a size in MiB, which is given as such or as a text such as `2G`."""
    if mebibytes is not None and mebibytes < 1:
        raise field_error(folder, f"{field}_mb", f"expected MiB above 0, got {mebibytes}")
    if text is None:
        return mebibytes
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * _UNIT_MB[match[2].upper()])
    if size < 1:
        raise field_error(folder, field, f"expected a size of at least 1M, such as 2G, got {text!r}")
    if mebibytes not in (None, size):
        raise field_error(folder, field, f"{text!r} and {field}_mb = {mebibytes} differ")
    return size
