"""Append-only JSON lines on disk.

Invariant: a line is whole or absent, and lines keep the order of the calls. A disk that refuses a line stops the run with an
error that names the cause.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

import orjson

from agentrl.errors import RunStopped
from agentrl.folders import make_private

_BLOCK_BYTES = 65536
_MAX_DEPTH = 200
"""Levels of a record that can be written; orjson takes 254."""
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


def encode_line(record: Mapping[str, object]) -> bytes:
    """Return `record` as one line of JSON; numpy arrays become lists, NaN and infinities null, other objects their repr.

    So do numbers of more than 64 bits. Half of a surrogate pair becomes its escape; a value nested too deeply, a note.
    """
    try:
        return orjson.dumps(record, default=repr, option=_OPTIONS)
    except TypeError:  # data of a user that JSON, or UTF-8, does not have
        return orjson.dumps(_encodable(record, _MAX_DEPTH), default=repr, option=_OPTIONS)


def _encodable(value: object, depth: int) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return repr(value)
    if isinstance(value, (Mapping, list, tuple)) and not depth:
        return f"{type(value).__name__}, nested too deeply"
    if isinstance(value, Mapping):
        fields = cast("Mapping[object, object]", value).items()
        return {str(_encodable(str(name), depth)): _encodable(field, depth - 1) for name, field in fields}
    if isinstance(value, (list, tuple)):
        return [_encodable(item, depth - 1) for item in cast("Sequence[object]", value)]
    return value


class JsonLines:
    """A JSONL file that is appended to, each line written at once: for small, rare records."""

    def __init__(self, path: Path, *, header: Mapping[str, object] | None = None) -> None:
        """Open `path` for appending; make its directory, and cut off half a line that a killed process left.

        Args:
            path: the file.
            header: the first line of a file that has none yet.

        Raises:
            RunStopped: when the file cannot be opened.
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
        """Write one line.

        Raises:
            RunStopped: naming the file and the cause, such as a full disk.
        """
        self.append_bytes(encode_line(record))

    def append_bytes(self, lines: bytes) -> None:
        """Write whole lines.

        Raises:
            RunStopped: naming the file and the cause.
        """
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
        """Check that the file that is written is still the one that its path names.

        Raises:
            RunStopped: the file was deleted, or replaced by another one.
        """
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
        """Close the file."""
        self._file.close()


def _whole_lines(path: Path) -> int:
    """Return the length, in bytes, of the whole lines of a file."""
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
