"""One source of tasks: rows of files or the product of a factory, mapped, filtered and limited.

Invariant: the tasks of a source that ends are all checked before anything starts, and their ids are unique. Of a source
without an end only the first task is checked before. A record has its place, so that an error names file, line and field.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, TypeAlias, cast

import orjson

from agentrl.config.names import local_dataset
from agentrl.data.config import SourceConfig
from agentrl.data.digest import check_unique
from agentrl.data.files import file_stem, find_files, read_rows
from agentrl.data.left_out import LeaveOut, LeftOutTask
from agentrl.data.stream import IteratedStream, TaskStream, stream_task
from agentrl.errors import ConfigError
from agentrl.support.companions import load_companion
from agentrl.support.exact_json import decode_exact_json, encode_exact_json
from agentrl.support.user_code import import_user_object
from agentrl.types import Task

logger = logging.getLogger(__name__)

_MAX_LEFT_OUT: Final = 100_000
"""Number of tasks in a row that a source that may have no end may leave out."""
OpenedSource: TypeAlias = tuple[Task, ...] | TaskStream


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
        value = self.optional(*names)
        if value is None:
            expected = " or ".join(map(repr, names))
            raise self.error(f"expected {kind} in the field {expected}; the record has {sorted(self)}")
        return value

    def optional(self, *names: str) -> object:
        return next((self[name] for name in names if self.get(name) is not None), None)

    def text(self, *names: str, may_be_empty: bool = False) -> str:
        value = self.value(*names, kind="text")
        if not isinstance(value, str) or not (may_be_empty or value.strip()):
            raise self.error(f"{names[0]!r}: expected text, got {value!r:.80}")
        return value

    def answer(self, *names: str) -> str:
        """Return a field that holds text or a finite number, as text; `5.0` becomes `5`, and 1e23 all its digits."""
        found = self.value(*names, kind="an answer")
        if isinstance(found, bool) or not isinstance(found, (str, int, float, Decimal)) or not str(found).strip():
            raise self.error(f"{names[0]!r}: expected text or a number, got {found!r:.80}")
        if isinstance(found, (float, Decimal)):
            if not math.isfinite(found):
                raise self.error(f"{names[0]!r}: expected text or a finite number, got {found!r:.80}")
            # Of the digits that a float is written with: 1e23 itself is 99999999999999991611392.
            exact = Decimal(repr(found)) if isinstance(found, float) else found
            return f"{exact or 0:.0f}" if exact == exact.to_integral_value() else str(found)
        return str(found).strip()

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
                found = decode_exact_json(found)
            except ValueError as error:
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


def open_source(config: SourceConfig, field: str, left_out: list[LeftOutTask] | None = None) -> OpenedSource:
    """Return the tasks of a source; `field`, such as `tasks`, names it in messages, and `left_out` gets what it skips."""
    left_out = [] if left_out is None else left_out
    opened = _open_file(config, field, left_out) if config.path is not None else _open_factory(config, field)
    if isinstance(opened, TaskStream):
        stream_task(opened, 0, f"{field}.factory: {config.factory}")
        return opened
    tasks = tuple(opened)
    check_unique(tasks, f"{field}: {config.origin}" if config.path is None else f"{field}.path: {config.path}")
    return tasks


def find_function(name: str, field: str) -> Callable[..., object]:
    """Return the function or class that a field names as `module:name`; the module may be in the current directory."""
    function = import_user_object(name, field)
    if not callable(function):
        raise ConfigError(f"{field}: {name} is not callable")
    return function


def never_ends(config: SourceConfig) -> bool:
    """Return whether a factory shows, without being called, that its tasks do not end: a `TaskStream`, or a generator."""
    if config.factory is None or config.limit is not None:
        return False
    try:
        factory = find_function(config.factory, "tasks.factory")
    except ConfigError:
        return False
    kind = factory if inspect.isclass(factory) else inspect.signature(factory, eval_str=True).return_annotation
    return inspect.isgeneratorfunction(factory) or (inspect.isclass(kind) and hasattr(kind, "task"))


def _open_file(config: SourceConfig, field: str, left_out: list[LeftOutTask]) -> Iterable[Task]:
    selection, known = _Selection(config, field), len(left_out)

    def leave_out(name: str, reason: str) -> None:
        left_out.append(LeftOutTask(field, name, reason))

    try:
        place = local_dataset(config.origin)
        items = (
            _file_records(place)
            if config.format is None
            else _read_tasks(config, config.format, place, leave_out if config.unreadable == "skip" else None)
        )
        yield from selection.limited(items)
    except ConfigError as error:
        raise ConfigError(f"{field}.path: {error}") from error
    selection.report()
    if count := len(left_out) - known:
        logger.warning("%s: %d task folders of %s cannot be read, and are left out", field, count, config.origin)


def _read_tasks(config: SourceConfig, form: str, place: str, leave_out: LeaveOut | None) -> Iterator[Task]:
    read = cast("Callable[[str, LeaveOut | None, Mapping[str, Any]], Iterable[Task]]", load_companion("agentrl.tasks", form))
    return iter(read(place, leave_out, config.workflow_args))


def _file_records(path: str) -> Iterator[DataRecord | Task]:
    for file, label in find_files(path):
        for row in read_rows(file):
            name = f"{label}-{row.number}" if label else str(row.number)
            task = given_task(row.fields)
            if task is not None:
                yield task
            else:
                yield DataRecord(row.fields, place=row.place, name=task_id(row.fields, name))


def _open_factory(config: SourceConfig, field: str) -> Iterable[Task] | TaskStream:
    name, make = cast("str", config.factory), find_function(cast("str", config.factory), f"{field}.factory")
    where = f"{field}.factory: {name}"

    def made() -> object:
        return _call_factory(make, config, where)

    selection, first = _Selection(config, field), made()
    if isinstance(first, TaskStream) and selection.keeps_all:
        return first
    if not isinstance(first, Iterable | TaskStream):
        raise ConfigError(
            f"{where} must return a sequence of agentrl.Task, an iterable of them, or an object with a method "
            f"task(index), got {type(first).__name__}"
        )
    if isinstance(first, Sequence) or config.limit is not None:
        max_left_out = None if isinstance(first, Sequence) else _MAX_LEFT_OUT
        return _read_all(selection, _made_items(_iterable(first, where), where), max_left_out)
    opened: list[object] = [first]  # for the first start; a generator can be read only once

    def start() -> Iterator[Task]:
        items = _made_items(_iterable(opened.pop() if opened else made(), where), where)
        return selection.kept(items, _MAX_LEFT_OUT)

    return IteratedStream(where, start)


def _read_all(selection: _Selection, items: Iterator[DataRecord | Task], max_left_out: int | None) -> Iterator[Task]:
    yield from selection.limited(items, max_left_out)
    selection.report()


def _iterable(made: object, where: str) -> Iterable[object]:
    if isinstance(made, TaskStream):
        return (stream_task(made, index, where) for index in itertools.count())
    return cast("Iterable[object]", made)


def _call_factory(make: Callable[..., object], config: SourceConfig, where: str) -> object:
    try:
        return make(**config.factory_args)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        what = f"{where}(**{dict(config.factory_args)}) raised {type(error).__name__}"
        raise ConfigError(f"{what}: {error}; check factory_args") from error


def _made_items(made: Iterable[object], where: str) -> Iterator[DataRecord | Task]:
    """Yield the tasks of a factory; a mapping is a record, named by its `id` or its number."""
    iterator = iter(made)
    for number in itertools.count(1):
        try:
            item = next(iterator)
        except StopIteration:
            return
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{where}: task {number} raised {type(error).__name__}: {error}") from error
        if isinstance(item, Mapping):
            fields = cast("Mapping[str, Any]", item)
            yield DataRecord(fields, place=f"{where}: task {number}", name=task_id(fields, str(number)))
        else:
            yield _check_task(item, f"{where}: task {number}")


def _check_task(task: object, where: str) -> Task:
    if not isinstance(task, Task):
        raise ConfigError(f"{where}: expected an agentrl.Task, got {type(task).__name__}")
    return task


class _Selection:
    def __init__(self, config: SourceConfig, field: str) -> None:
        self._config, self._field = config, field
        self._map = None if config.map is None else find_function(config.map, f"{field}.map")
        self._accepted = {
            name: cast("list[object]", value) if isinstance(value, list) else [value]
            for name, value in config.filter.items()
        }
        self._seen = self._kept = 0

    @property
    def keeps_all(self) -> bool:
        return self._map is None and not self._accepted and self._config.limit is None

    def limited(self, items: Iterator[DataRecord | Task], max_left_out: int | None = None) -> Iterator[Task]:
        yield from itertools.islice(self.kept(items, max_left_out), self._config.limit)

    def kept(self, items: Iterator[DataRecord | Task], max_left_out: int | None) -> Iterator[Task]:
        """Yield the kept tasks; in a source that may have no end, at most `max_left_out` in a row are left out."""
        left_out = 0
        for item in items:
            self._seen += 1
            task = self._mapped(item)
            if task is not None and self._passes(task):
                self._kept, left_out = self._kept + 1, 0
                yield task
                continue
            left_out += 1
            if left_out == max_left_out:
                raise ConfigError(f"{self._field}: map and filter leave out {left_out} tasks in a row; check them")

    def report(self) -> None:
        """Log how many rows were left out; raise `ConfigError` if no other was there."""
        left_out = self._seen - self._kept
        if left_out and not self._kept:
            raise ConfigError(f"{self._field}: map and filter leave out all {self._seen} tasks of {self._config.origin}")
        if left_out:
            logger.info("%s: map and filter left out %d of %d tasks", self._config.origin, left_out, self._seen)

    def _mapped(self, item: DataRecord | Task) -> Task | None:
        if self._map is None:
            return item if isinstance(item, Task) else Task(id=item.name, data=dict(item))
        if isinstance(item, Task):
            item = DataRecord(item.data, place=f"{self._config.origin}: task {item.id}", name=item.id)
        where = f"{item.place}: {self._field}.map: {self._config.map}"
        try:
            made = self._map(item)
        except ConfigError as error:
            text = str(error)
            raise ConfigError(text if text.startswith(item.place) else f"{where}: {text}") from error
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{where} raised {type(error).__name__}: {error}") from error
        if made is None or isinstance(made, Task):
            return made
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"{where}: expected an agentrl.Task, a dict of its fields, or None to leave the row out, got "
                f"{type(made).__name__}"
            )
        fields = cast("Mapping[str, Any]", made)
        return Task(id=task_id(fields, item.name), data=fields)

    def _passes(self, task: Task) -> bool:
        for name, accepted in self._accepted.items():
            if name not in task.data:
                raise ConfigError(
                    f"{self._field}.filter: task {task.id} has no field {name!r}; it has {', '.join(map(str, task.data))}"
                )
            if task.data[name] not in accepted:
                return False
        return True


_FORMAT: Final = "agentrl.task"


def task_id(fields: Mapping[str, Any], default: str) -> str:
    """Return the `id` of a row as text; `default` where the field is missing or null."""
    own = fields.get("id")
    return default if own is None else str(own)


def task_row(task: Task) -> bytes:
    """Return a task as one row of JSON lines, with its fields apart from its id; a TypeError if a field is not JSON."""
    row = {"format": _FORMAT, "id": task.id, "data": dict(task.data)}
    return encode_exact_json(row, orjson.OPT_SERIALIZE_NUMPY)


def given_task(fields: Mapping[str, Any]) -> Task | None:
    """Return the task in a row that `task_row` wrote; None for any other row."""
    data = fields.get("data")
    if set(fields) != {"format", "id", "data"} or fields["format"] != _FORMAT or not isinstance(data, dict):
        return None
    return Task(id=str(fields["id"]), data=cast("dict[str, Any]", data))
