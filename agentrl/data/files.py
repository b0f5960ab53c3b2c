"""The rows of data files: JSON lines, JSON, CSV, TSV, parquet, and folders that `datasets` saved.

Invariant: no row is skipped, and no code of a file runs. A `ConfigError` names file and line or row.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from agentrl.errors import ConfigError
from agentrl.support.exact_json import decode_exact_json

FILE_KINDS: Final = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Kinds of files; all but parquet may be compressed, as `.jsonl.gz`."""
_BYTE_ORDER_MARK: Final = codecs.BOM_UTF8


class FileRow(NamedTuple):
    """One row of a data file."""

    number: int
    """Of the line in JSON lines, else of the row, from 1."""
    place: str
    """For messages, such as `train.jsonl:3`."""
    fields: Mapping[str, Any]


class NamedFile(NamedTuple):
    """A file, or a folder that `datasets` saved."""

    path: Path
    label: str
    """Its place in the folder that was asked for, without the ending; empty for a file that was asked for itself."""


def find_files(path: str | Sequence[str]) -> Iterator[NamedFile]:
    """Yield the data files that a path names, in order.

    A path is a file, a pattern such as `data/train-*.parquet`, a folder of files, or a folder that `datasets` saved.
    """
    for each in [path] if isinstance(path, str) else path:
        root = Path(each)
        if "*" in each and not root.exists():
            paths = sorted(root.parent.glob(root.name))
            if not paths:
                raise ConfigError(f"{each}: no file fits this pattern")
            yield from (NamedFile(file, "" if len(paths) == 1 else file_stem(file)) for file in paths)
        elif root.is_dir() and not is_saved_dataset(root):
            files = _files_below(root)
            if not files:
                raise ConfigError(f"{root}: this folder holds no file of {', '.join(FILE_KINDS)}")
            yield from (NamedFile(file, str(file.relative_to(root).with_name(file_stem(file)))) for file in files)
        else:
            yield NamedFile(root, "")


def _files_below(root: Path) -> list[Path]:
    """Return the data files in a folder and its sub-folders, in order; what begins with a dot is skipped."""
    found: list[Path] = []
    for path in sorted(root.rglob("*")):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue
        if path.is_dir() and is_saved_dataset(path):
            raise ConfigError(f"{root}: the sub-folder {path} is a data set that `datasets` saved; name it itself")
        if path.is_file() and _kind(path) in FILE_KINDS:
            found.append(path)
    return found


def read_rows(file: Path) -> Iterator[FileRow]:
    """Yield the rows of a file, or of a folder that `datasets` saved."""
    if file.is_dir():
        yield from _numbered(file, read_saved_dataset(file))
        return
    kind = _kind(file)
    if kind not in FILE_KINDS:
        raise ConfigError(f"{file}: expected a file of {', '.join(FILE_KINDS)}, got {kind or 'no ending'}; convert it")
    if not file.exists():  # a pipe is fine
        raise ConfigError(f"cannot read {file}: there is no such file")
    if kind == ".parquet":
        yield from _numbered(file, read_parquet(file))
        return
    try:
        with _opened(file) as stream:
            if kind in (".csv", ".tsv"):
                yield from _table_rows(file, stream, "\t" if kind == ".tsv" else ",")
            elif kind == ".json":
                yield from _json_rows(file, stream.read())
            else:
                yield from _line_rows(file, stream)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


def file_stem(file: Path) -> str:
    """Return the name of a file without its kind: `train` for `train.jsonl.gz`, `part.0` for `part.0.parquet`."""
    name = file.name.removesuffix(".gz")
    kind = _kind(file)
    return name.removesuffix(kind) if kind in FILE_KINDS else name


def _kind(file: Path) -> str:
    name = file.name.removesuffix(".gz")
    return "" if name != file.name and name.endswith(".parquet") else Path(name).suffix


def _opened(file: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(file, "rb")) if file.name.endswith(".gz") else file.open("rb")


def _numbered(file: Path, rows: Iterator[Mapping[str, Any]]) -> Iterator[FileRow]:
    yield from (FileRow(number, f"{file}: row {number}", row) for number, row in enumerate(rows, 1))


def _line_rows(file: Path, lines: IO[bytes]) -> Iterator[FileRow]:
    for number, marked in enumerate(lines, 1):
        line = marked.removeprefix(_BYTE_ORDER_MARK)  # at the start, and where files were joined
        if line.strip():
            place = f"{file}:{number}"
            try:
                yield FileRow(number, place, _json_object(decode_exact_json(line), place))
            except ValueError as error:
                where = f"{place}: expected a JSON object, got {line.rstrip()[:60]!r}"
                raise ConfigError(f"{where} ({error}); fix or remove the line") from None


def _json_rows(file: Path, data: bytes) -> Iterator[FileRow]:
    data = data.removeprefix(_BYTE_ORDER_MARK)
    try:
        found = decode_exact_json(data)
    except ValueError as error:
        if data.lstrip().startswith(b"["):
            raise ConfigError(f"{file}: expected a list of records as JSON: {error}") from None
        yield from _line_rows(file, io.BytesIO(data))
        return
    items = cast("list[object]", found) if isinstance(found, list) else [found]
    for number, item in enumerate(items, 1):
        place = f"{file}: record {number}"
        yield FileRow(number, place, _json_object(item, place))


def _table_rows(file: Path, stream: IO[bytes], delimiter: str) -> Iterator[FileRow]:
    try:
        with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
            reader = csv.DictReader(text, strict=True, delimiter=delimiter)
            names = list(reader.fieldnames or [])
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ConfigError(f"{file}: the header names {twice[0]!r} more than once; rename one of the columns")
            for number, row in enumerate(reader, 1):
                place = f"{file}:{reader.line_num}"
                if None in row or None in row.values():
                    raise ConfigError(f"{place}: expected {len(names)} columns; fix the row")
                yield FileRow(number, place, {str(name): value for name, value in row.items() if value != ""})
    except (csv.Error, UnicodeDecodeError) as error:
        kind = "TSV" if delimiter == "\t" else "CSV"
        raise ConfigError(f"{file}: expected {kind} with a header, in UTF-8: {error}") from error


def _json_object(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: expected a JSON object, got {type(value).__name__}; fix or remove it")
    return cast("dict[str, Any]", value)


_BATCH_ROWS: Final = 1024
_DICT_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"


def read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a parquet file, a batch in memory at a time."""
    parquet = _pyarrow("pyarrow.parquet", file)
    try:
        with parquet.ParquetFile(str(file)) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
                yield from cast("list[Mapping[str, Any]]", batch.to_pylist())
    except (OSError, ValueError, _pyarrow("pyarrow", file).ArrowException) as error:
        raise ConfigError(f"{file}: expected parquet: {error}") from error


def is_saved_dataset(folder: Path) -> bool:
    """Return whether `datasets` saved this folder, as one data set or as several splits."""
    return (folder / _DICT_FILE).is_file() or (folder / _STATE_FILE).is_file()


def read_saved_dataset(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a folder that `datasets` saved; pyarrow reads it."""
    if (folder / _DICT_FILE).is_file():
        listed: object = _json_file(folder / _DICT_FILE).get("splits")
        splits = [str(name) for name in cast("list[object]", listed)] if isinstance(listed, list) else []
        splits = splits or ["train"]
        raise ConfigError(
            f"{folder}: this folder holds the splits {', '.join(splits)}; name one, such as {folder}/{splits[0]}"
        )
    arrow = _pyarrow("pyarrow", folder)
    for name in _shard_names(folder / _STATE_FILE):
        file = folder / name
        try:
            with arrow.memory_map(str(file)) as mapped, arrow.ipc.open_stream(mapped) as batches:
                for batch in batches:
                    yield from cast("list[Mapping[str, Any]]", batch.to_pylist())
        except (OSError, ValueError, arrow.ArrowException) as error:
            raise ConfigError(f"{file}: expected an Arrow stream, as datasets writes it: {error}") from error


def _shard_names(state: Path) -> Iterator[str]:
    shards: object = _json_file(state).get("_data_files")
    if not isinstance(shards, list):
        raise ConfigError(f"{state}: expected a list `_data_files`, as datasets writes it, got {type(shards).__name__}")
    for number, shard in enumerate(cast("list[object]", shards), 1):
        name: object = cast("dict[str, object]", shard).get("filename") if isinstance(shard, dict) else None
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(
                f"{state}: file {number} of `_data_files`: expected a `filename` in this folder, as datasets writes it, got "
                f"{name!r}; save the data set again"
            )
        yield name


def _json_file(file: Path) -> dict[str, Any]:
    try:
        found = decode_exact_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: expected JSON, as datasets writes it: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, as datasets writes it, got {type(found).__name__}")
    return cast("dict[str, Any]", found)


def _pyarrow(module: str, file: Path) -> Any:  # noqa: ANN401 - imported only where it is used
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{file}: this needs pyarrow, which is not installed: pip install 'agentrl[data]', or convert it to JSON lines"
        ) from None
