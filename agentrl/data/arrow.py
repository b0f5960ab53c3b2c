"""The rows of parquet files, and of folders that `datasets.Dataset.save_to_disk` wrote, read by pyarrow without `datasets`.

Invariant: rows come in the order of the file, a batch in memory at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import orjson

from agentrl.errors import ConfigError

_BATCH_ROWS: Final = 1024
_DICT_FILE: Final = "dataset_dict.json"
_STATE_FILE: Final = "state.json"


def read_parquet(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a parquet file.

    Raises:
        ConfigError: the file is no parquet, or pyarrow is not installed.
    """
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
    """Yield the rows of a folder that `datasets.Dataset.save_to_disk` wrote.

    Raises:
        ConfigError: the folder holds several splits, a file of it is missing or broken, or pyarrow is not installed.
    """
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
    """Yield the names of the files that hold the rows, in order.

    Raises:
        ConfigError: the state does not name them, or names one outside its folder.
    """
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
        found = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
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
