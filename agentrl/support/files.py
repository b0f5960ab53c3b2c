"""JSON files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

_JSON = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def json_text(values: Mapping[str, Any]) -> str:
    """Return values as indented JSON."""
    return orjson.dumps(values, option=_JSON).decode()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write an indented JSON file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    written = orjson.dumps(values, option=_JSON)
    try:
        temporary.write_bytes(written)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
