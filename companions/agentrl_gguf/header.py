"""The header of a GGUF file: keys, and for each tensor its type, shape and place. No tensor is read.

The package `gguf` has a reader too; for a vocabulary of 150,000 tokens it takes eight seconds, and a damaged count keeps it
busy without an end.

Invariant: every string, array and tensor of an opened file lies within the file, so a file that was cut short or damaged
is refused before anything is read from it or written.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, TypeVar, cast

import numpy as np

from agentrl.errors import ConfigError
from agentrl.support.foreign import one_line, shortened

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_NUMBERS: Final = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_DIMENSIONS: Final = 4
Scalar: TypeAlias = bool | int | float | str
Value: TypeAlias = Scalar | list[Scalar]
_Kind = TypeVar("_Kind", bool, int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantized:
    """A tensor of a GGUF file that is not read yet."""

    name: str
    shape: tuple[int, ...]
    """As PyTorch writes it: rows first."""
    type_name: str
    """Name of its type in ggml, such as `Q4_1`."""
    type_number: int
    start: int
    """First byte in the file."""
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """The keys and the list of tensors of a GGUF file; a key that is missing or of another type is a ConfigError."""

    path: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, StoredQuantized]

    @property
    def architecture(self) -> str:
        return self.need("general.architecture", str)

    def need(self, key: str, kind: type[_Kind]) -> _Kind:
        found = self.get(key, kind)
        if found is None:
            raise self.error(f"no key {key}; the file is no whole model, so fetch or convert it again")
        return found

    def get(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return a single value; an integer is a float too, and None means that the key is not there."""
        if (found := self.values.get(key)) is None:
            return None
        if kind is float and type(found) is int:
            return cast("_Kind", float(found))
        if type(found) is not kind:
            raise self.error(f"{key}: expected {kind.__name__}, got {type(found).__name__}; convert the file again")
        return cast("_Kind", found)

    def strings(self, key: str) -> list[str] | None:
        return self._list(key, str)

    def integers(self, key: str) -> list[int] | None:
        return self._list(key, int)

    def numbers(self, key: str) -> list[float] | None:
        return self._list(key, float)

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path}: {one_line(shortened(what, 2000))}")

    def _list(self, key: str, kind: type[_Kind]) -> list[_Kind] | None:
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, list) or any(type(item) is not kind for item in found):
            raise self.error(f"{key}: expected a list of {kind.__name__}; convert the file again")
        return cast("list[_Kind]", found)


def is_gguf(path: str | Path) -> bool:
    """Return whether a path is that of a GGUF file, by its name, or by its first bytes where it is a file."""
    if str(path).endswith(".gguf"):
        return True
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_header(path: Path) -> GgufHeader:
    """Return the header of a GGUF file.

    Raises:
        ConfigError: it cannot be read, is no GGUF file of version 2 or 3, or is damaged or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Walk(path, mapped).header()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is empty"
        raise ConfigError(f"{path}: cannot be read as a GGUF file: {reason}") from error


class _Walk:
    """Reads a header from its first byte to its last."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> GgufHeader:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise ConfigError(f"{self._path}: not a GGUF file: it does not begin with the letters GGUF")
        self._at = len(_MAGIC)
        version = self._number(4)
        if version not in _VERSIONS:
            raise ConfigError(
                f"{self._path}: GGUF of version {version} or of the other byte order; expected version 2 or 3, "
                "little-endian; convert the model again"
            )
        num_tensors, num_keys = self._number(10), self._number(10)
        values: dict[str, Value] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in values:
                raise self._damaged(f"the key {one_line(key)} is there twice")
            values[key] = self._value(self._number(4))
        listed = [self._listed_tensor() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"general.alignment is {alignment!r}")
        body = -(-self._at // alignment) * alignment
        tensors = {name: self._placed(name, shape, kind, body + offset) for name, shape, kind, offset in listed}
        if len(tensors) != len(listed):
            raise self._damaged("a tensor is listed twice")
        return GgufHeader(path=self._path, values=values, tensors=tensors)

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise self._short("within its keys")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, kind: int) -> int:
        return int.from_bytes(self._take(8 if kind == 10 else 4), "little")

    def _string(self) -> str:
        raw = self._take(self._number(10))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"text before byte {self._at} is not UTF-8") from error

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._numbers(kind, 1)[0]

    def _array(self) -> list[Scalar]:
        kind, count = self._number(4), self._number(10)
        if kind != _STRING:
            return self._numbers(kind, count)
        if count * 8 > len(self._data) - self._at:  # each string has a length of 8 bytes
            raise self._short("within a list of strings")
        return [self._string() for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> list[Scalar]:
        if kind not in _NUMBERS:
            raise self._damaged(f"a value has the type {kind}")
        form = np.dtype(_NUMBERS[kind])
        return cast("list[Scalar]", np.frombuffer(self._take(count * form.itemsize), form).tolist())

    def _listed_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._number(4)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise self._damaged(f"the tensor {one_line(name)} has {dimensions} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))
        return name, tuple(reversed(sizes)), self._number(4), self._number(10)

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> StoredQuantized:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            known = GGMLQuantizationType(kind)
        except ValueError:
            raise ConfigError(
                f"{self._path}: tensor {one_line(name)} has the type {kind}, which the package gguf does not know; "
                "install a newer gguf, or quantize the model in another type"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[known]
        if shape[-1] % block:
            raise self._damaged(
                f"the rows of {one_line(name)} {list(shape)} are no multiple of {block}, as {known.name} needs"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        if start + num_bytes > len(self._data):
            raise self._short(f"before the end of {one_line(name)}")
        return StoredQuantized(
            name=name, shape=shape, type_name=known.name, type_number=kind, start=start, num_bytes=num_bytes
        )

    def _short(self, where: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: cut short or damaged: its {len(self._data):,} bytes end {where}; fetch or copy the file again"
        )

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: damaged: {what}; fetch or copy the file again")
