"""Files that commands write, and JSON that they take as flags."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, cast

import orjson

from agentrl.errors import ConfigError
from agentrl.files import json_text as json_text
from agentrl.files import write_json as write_json

_TRIAL = bytes(4096)


def check_writable(path: Path, what: str) -> None:
    """Check, before a command starts its work, that it can write `path`; a trial file is written and removed.

    Args:
        path: the file or directory that the command will make.
        what: names `path` in the message, such as `--output report.json`.

    Raises:
        ConfigError: it cannot be written; the message says why.
    """
    place = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with NamedTemporaryFile(dir=place, prefix=f".{path.name}.") as trial:
            trial.write(_TRIAL)
            trial.flush()
    except OSError as error:
        raise ConfigError(f"{what}: cannot write in {place}: {error.strerror}; fix that, or write elsewhere") from error


def parse_json_object(text: str, flag: str) -> dict[str, Any]:
    """Return the fields of a JSON object that the value of `flag` holds.

    Raises:
        ConfigError: the text is no JSON object.
    """
    try:
        found: object = orjson.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text[:80]}")
    return cast("dict[str, Any]", found)
