"""Whether what a command will make can be written, asked before it has worked for it.

Invariant: what passes could be written at that moment, and nothing is left of the trial; what does not is one message.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile

from agentrl.errors import ConfigError

_TRIAL = bytes(4096)


def check_writable(path: Path, what: str) -> None:
    """Write a file where `path`, or the first directory that has to be made for it, will be; it is removed again.

    Args:
        path: the file or directory the command will make.
        what: names it in the message, such as `--output report.json`.

    Raises:
        ConfigError: it cannot be written, and why.
    """
    place = next(folder for folder in path.absolute().parents if folder.exists())
    try:
        with NamedTemporaryFile(dir=place, prefix=f".{path.name}.") as trial:
            trial.write(_TRIAL)
            trial.flush()
    except OSError as error:
        raise ConfigError(f"{what}: cannot write in {place}: {error.strerror}; mend that, or write elsewhere") from error
