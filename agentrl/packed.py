"""Frozen records at a lower price: array fields kept as bytes, and records written field by field.

A numpy array object takes 112 bytes beside its data, which is more than the data of a short turn. A packed field takes an
array, keeps its bytes, and gives a read-only array over them. Where many records are made, they are written `opened`.

Invariant: a packed field gives back exactly the values, in the declared type, that it was given; what was written `opened`
and closed is the record its class would make.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MemberDescriptorType
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Record = TypeVar("Record")


class PackedArray:
    """The descriptor that stands in the place of a slot."""

    def __init__(self, slot: MemberDescriptorType, dtype: type[np.generic]) -> None:
        """Keep values in `slot`, as bytes of `dtype`."""
        self.raw: Callable[[object], bytes] = slot.__get__
        """Returns the bytes of the array of a record."""
        self.put: Callable[[object, object], None] = slot.__set__
        """Sets the bytes of the array of a record, be it frozen or not."""
        self._dtype = np.dtype(dtype)
        self.__doc__ = slot.__doc__

    def __get__(self, record: object, owner: type | None = None) -> NDArray[Any] | PackedArray:
        return self if record is None else np.frombuffer(self.raw(record), self._dtype)

    def __set__(self, record: object, value: object) -> None:
        array = np.asarray(value, self._dtype)
        kept = cast("object", array.base)  # an array over whole bytes shares them
        self.put(record, kept if type(kept) is bytes and len(kept) == array.nbytes else array.tobytes())


def packed(**dtypes: type[np.generic]) -> Callable[[type[Record]], type[Record]]:
    """Return a decorator for a slotted dataclass that packs the named one-dimensional array fields."""

    def pack(record: type[Record]) -> type[Record]:
        for name, dtype in dtypes.items():
            setattr(record, name, PackedArray(record.__dict__[name], dtype))
        return record

    return pack


def opened(record: type) -> type[Any]:
    """Return a class with the slots of a frozen dataclass, but writable; its objects become records by their `__class__`.

    The `__init__` of a frozen dataclass finds out anew how to set each field, at six times the cost. Packed fields take
    bytes here, and no default is filled in: a field that is left out is an AttributeError when it is read.
    """
    return type(record.__name__, (), {"__slots__": vars(record)["__slots__"]})
