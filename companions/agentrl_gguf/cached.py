"""Imports that run files ask for: `model: {path: FILE.gguf}` becomes a directory in the user's cache, once for each file.

The directory is named by the file's place, size and time of change, so asking again costs no reading. Remove
`~/.cache/agentrl/models` to free its space; a run makes it again.

Who waits for whom: a process that finds the lock taken waits until the other has imported the file, and then uses that.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from agentrl.errors import ConfigError
from agentrl.processes.machine import free_memory
from agentrl.support.companions import ModelFile
from agentrl.support.folders import make_private
from agentrl_gguf.importing import (
    FORM,
    CheckedFile,
    check_file,
    check_space,
    config_of,
    read_record,
    record_of,
    write_model_directory,
)
from agentrl_gguf.progress import import_bar, say
from agentrl_gguf.weights import ELEMENT_BYTES


def model_directory(path: str) -> Path:
    """Return the Hugging Face directory of a GGUF file, imported if it is not there yet.

    Raises:
        ConfigError: the file cannot be imported.
        TrainError: the cache cannot be written.
    """
    file = Path(path)
    directory = cached_directory(file)
    if read_record(directory) is not None:
        return directory
    checked = _checked(file, directory)
    with _lock(directory):
        if read_record(directory) is None:
            with import_bar(file.name, checked.model.num_parameters) as on_progress:
                write_model_directory(checked, record_of(checked), directory, on_progress=on_progress)
    return directory


def model_config(path: str) -> dict[str, Any]:
    """Return config.json of a GGUF file from its header; nothing is imported.

    Raises:
        ConfigError: the file cannot be imported on this machine.
    """
    file = Path(path)
    return config_of(_checked(file, cached_directory(file)))


GGUF: Final = ModelFile(config=model_config, directory=model_directory)
"""The format, for the core."""


def _checked(file: Path, directory: Path) -> CheckedFile:
    """Return what is needed to import a file that this machine can hold, on its disk and in its memory."""
    checked, free = check_file(file), free_memory()
    if read_record(directory) is None:
        check_space(checked, directory)
    least = checked.model.num_parameters * ELEMENT_BYTES["bfloat16"]
    if free is not None and least > free:
        raise ConfigError(
            f"{file}: its {checked.model.num_parameters:,} weights take {least / 1e9:.1f} GB of memory even in bfloat16, "
            f"and {free / 1e9:.1f} GB are free; use a smaller model, or import it for another machine: agentrl import FILE "
            "DIRECTORY"
        )
    return checked


def cached_directory(file: Path) -> Path:
    """Return the place of a file's import; it need not be there."""
    try:
        place = file.resolve(strict=True)
        facts = place.stat()
    except OSError as error:
        raise ConfigError(f"{file}: there is no such file: {error.strerror}") from error
    if not place.is_file():
        raise ConfigError(f"{file}: expected a GGUF file, and it is a directory")
    name = f"{FORM}\0{place}\0{facts.st_size}\0{facts.st_mtime_ns}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        home / "agentrl" / "models" / f"{file.name.removesuffix('.gguf')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    )


@contextmanager
def _lock(directory: Path) -> Generator[None]:
    make_private(directory.parent)
    with directory.with_name(f".{directory.name}.lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process imports {directory.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
