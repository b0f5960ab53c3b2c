"""Why task folders cannot be read, in words that count alike for all folders with the same fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError

_LINE: Final = re.compile(r"(Dockerfile):\d+")
_ADVICE: Final = ("; leave the task out, or change the field", "; leave the task out")


def reason_of(error: ConfigError, folder: Path) -> str:
    """Return what an error says of a folder, without the folder, the number of a line and the advice for one task.

    Example:
        >>> reason_of(ConfigError("/tasks/a/environment/Dockerfile:7: RUN pip needs a network"), Path("/tasks/a"))
        'environment/Dockerfile: RUN pip needs a network'
    """
    place = str(folder.resolve())
    text = str(error).removeprefix(f"{place}: ").replace(f"{place}/", "").replace(place, "the folder")
    for advice in _ADVICE:
        text = text.removesuffix(advice)
    return _LINE.sub(r"\1", text)
