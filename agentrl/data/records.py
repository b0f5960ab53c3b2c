"""The records of data files, each with its place, so that an error names file, line and field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import orjson

from agentrl.data.files import file_stem, find_files, read_rows
from agentrl.errors import ConfigError


class DataRecord(dict[str, Any]):
    """The fields of a row of a data file, with its place. A field that is not as asked for is a ConfigError.

    `name` is for the id of its task, such as `train-3`; it is unique among the files that were read.

    Example:
        >>> record = DataRecord({"question": "1 + 1?", "answer": 2.0}, place="train.jsonl:3", name="train-3")
        >>> record["question"], record.answer("answer")
        ('1 + 1?', '2')
    """

    def __init__(self, fields: Mapping[str, Any], *, place: str, name: str) -> None:
        super().__init__(fields)
        self.place, self.name = place, name

    def value(self, *names: str, kind: str = "a value") -> object:
        """Return the first of these fields that is there and not null."""
        found = self.optional(*names)
        if found is None:
            expected = " or ".join(map(repr, names))
            raise self.error(f"expected {kind} in the field {expected}; the record has {sorted(self)}")
        return found

    def optional(self, *names: str) -> object:
        return next((self[name] for name in names if self.get(name) is not None), None)

    def text(self, *names: str, may_be_empty: bool = False) -> str:
        found = self.value(*names, kind="text")
        if not isinstance(found, str) or not (may_be_empty or found.strip()):
            raise self.error(f"{names[0]!r}: expected text, got {found!r:.80}")
        return found

    def answer(self, *names: str) -> str:
        """Return a field that holds text or a number, as text; `5.0` becomes `5`."""
        found = self.value(*names, kind="an answer")
        if isinstance(found, bool) or not isinstance(found, (str, int, float)) or not str(found).strip():
            raise self.error(f"{names[0]!r}: expected text or a number, got {found!r:.80}")
        return str(int(found)) if isinstance(found, float) and found.is_integer() else str(found).strip()

    def texts(self, *names: str) -> list[str]:
        """Return a field that holds a list of texts, or such a list written as JSON."""
        found = self.listed(*names)
        if not all(isinstance(item, str) for item in found):
            raise self.error(f"{names[0]!r}: expected a list of texts, got {found!r:.80}")
        return cast("list[str]", found)

    def listed(self, *names: str) -> list[object]:
        """Return a field that holds a list, or a list written as JSON."""
        found = self.value(*names, kind="a list")
        if isinstance(found, str):
            try:
                found = orjson.loads(found)
            except orjson.JSONDecodeError as error:
                raise self.error(f"{names[0]!r}: expected a list as JSON, got {found!r:.80} ({error})") from None
        if not isinstance(found, list):
            raise self.error(f"{names[0]!r}: expected a list, got {found!r:.80}")
        return cast("list[object]", found)

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.place}: {what}; fix or remove the record")


def read_records(path: str | Sequence[str], *, start: int = 0, count: int | None = None) -> list[DataRecord]:
    """Return `count` records of the files that `find_files` finds, without the first `start`; none is a ConfigError."""
    if start < 0 or (count is not None and count < 1):
        raise ConfigError(f"expected start of at least 0 and count of at least 1, got start={start} and count={count}")
    records = list(iterate_records(path))
    kept = records[start:] if count is None else records[start : start + count]
    if not kept:
        raise ConfigError(f"{path}: no records are left of {len(records)} with start={start}")
    return kept


def iterate_records(path: str | Sequence[str]) -> Iterator[DataRecord]:
    """Yield the records of files one after the other; a record's name has the number of its row, not of its line."""
    for file, label in find_files(path):
        rows = read_rows(file)
        first, second = next(rows, None), next(rows, None)
        if first is None:
            continue
        prefix = label or file_stem(file)
        yield DataRecord(first.fields, place=first.place, name=label if label and second is None else f"{prefix}-1")
        if second is not None:
            yield DataRecord(second.fields, place=second.place, name=f"{prefix}-2")
        for number, row in enumerate(rows, 3):
            yield DataRecord(row.fields, place=row.place, name=f"{prefix}-{number}")
