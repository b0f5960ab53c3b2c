"""Append-only JSON lines on disk.

Invariant: a line is whole or absent, and lines keep the order of the calls. A disk that refuses a line stops the run with an
error that names the cause.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from agentrl.episode.codec import encode_line
from agentrl.errors import RunStopped
from agentrl.support.folders import make_private

_BLOCK_BYTES = 65536


class JsonLines:
    """A JSONL file that is appended to, each line written at once: for small, rare records."""

    def __init__(self, path: Path, *, header: Mapping[str, object] | None = None) -> None:
        """Open `path` for appending; make its directory, and cut off half a line that a killed process left.

        `header` is the first line of a file that has none yet.
        """
        self.path = path
        try:
            make_private(path.parent)
            if path.is_file():
                os.truncate(path, _whole_lines(path))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(path, error) from error
        if header is not None and not self._file.tell():
            try:
                self.append(header)
            except RunStopped:
                self.close()
                raise

    def append(self, record: Mapping[str, object]) -> None:
        self.append_bytes(encode_line(record))

    def append_bytes(self, lines: bytes) -> None:
        """Write whole lines."""
        written = 0
        try:
            while written < len(lines):
                written += self._file.write(lines[written:])
        except OSError as error:
            if written:
                with suppress(OSError):  # half a line would make the file unreadable
                    self._file.truncate(self._file.tell() - written)
            raise cannot_write(self.path, error) from error

    def check_in_place(self) -> None:
        """Check that the file that is written is still the one that its path names."""
        written = os.fstat(self._file.fileno())
        try:
            named = self.path.stat()
        except FileNotFoundError:
            what = "was deleted"
        except OSError as error:
            raise RunStopped(f"cannot find {self.path}, which the run writes: {error.strerror}") from error
        else:
            if (named.st_dev, named.st_ino) == (written.st_dev, written.st_ino):
                return
            what = "was replaced by another file"
        raise RunStopped(
            f"{self.path} {what} while the run wrote it, so what the run records is lost; start the run again, and leave "
            "its directory in place until it ends"
        )

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> int:
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                return start + at + 1
            end = start
    return 0


def cannot_write(path: Path, error: OSError) -> RunStopped:
    """Return the error for a file that the disk refuses."""
    return RunStopped(f"cannot write {path}: {error.strerror or error}; free some space or choose another runs_dir")
