"""The episodes of a run as a table: one row for each finished attempt.

Invariant: a table keeps the order in which the episodes ended, except where a method sorts them. No method reads a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

import msgspec

from agentrl.episode.summary import EpisodeSummary
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingImports]
    import polars  # pyright: ignore[reportMissingImports]


class EpisodeTable(Sequence[EpisodeSummary]):
    """Summaries of episodes."""

    def __init__(self, rows: Sequence[EpisodeSummary]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, at: int) -> EpisodeSummary: ...
    @overload
    def __getitem__(self, at: slice) -> EpisodeTable: ...
    def __getitem__(self, at: int | slice) -> EpisodeSummary | EpisodeTable:
        return EpisodeTable(self._rows[at]) if isinstance(at, slice) else self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[EpisodeSummary]:
        return iter(self._rows)

    def __repr__(self) -> str:
        failed = len(self.failed())
        return f"EpisodeTable({len(self)} episodes, {failed} failed)"

    def where(self, keep: Callable[[EpisodeSummary], bool]) -> EpisodeTable:
        """Return the rows for which `keep` is true."""
        return EpisodeTable([row for row in self._rows if keep(row)])

    def best(self, n: int = 5) -> EpisodeTable:
        """Return the `n` rows with the highest returns, highest first; failed episodes have none."""
        return EpisodeTable(self._by_return(reverse=True)[:n])

    def worst(self, n: int = 5) -> EpisodeTable:
        """Return the `n` rows with the lowest returns, lowest first; failed episodes have none."""
        return EpisodeTable(self._by_return(reverse=False)[:n])

    def failed(self) -> EpisodeTable:
        """Return the rows of attempts without a usable result."""
        return self.where(lambda row: row.failure is not None)

    def forked(self) -> EpisodeTable:
        """Return the rows of episodes in which a request did not extend the latest turn of its conversation."""
        return self.where(lambda row: bool(row.forks))

    def of_group(self, group: int) -> EpisodeTable:
        """Return the rows of one group, failed attempts included."""
        return self.where(lambda row: row.group == group)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return each row as a dict of plain values."""
        return [msgspec.structs.asdict(row) for row in self._rows]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas data frame with one row for each episode; `forks` and `players` hold dicts and lists."""
        return _pandas_frame(self.to_dicts(), _COLUMNS)

    def to_polars(self) -> polars.DataFrame:
        """Return a polars data frame with one row for each episode; `forks` is JSON text, `players` a list."""
        rows = [{**row, "forks": msgspec.json.encode(row["forks"]).decode()} for row in self.to_dicts()]
        return _polars_frame(rows, _COLUMNS)

    def _by_return(self, *, reverse: bool) -> list[EpisodeSummary]:
        done = [(row.episode_return, row) for row in self._rows if row.episode_return is not None]
        return [row for _, row in sorted(done, key=lambda pair: pair[0], reverse=reverse)]


_COLUMNS = list(EpisodeSummary.__struct_fields__)


class MetricLines(list[Mapping[str, Any]]):
    """Lines of `metrics.jsonl`, in their order."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas data frame: a row for each line, a column for each key; nested keys have dots in their names."""
        return _pandas_frame([_dotted(line) for line in self], None)

    def to_polars(self) -> polars.DataFrame:
        """Return the same as a polars data frame."""
        return _polars_frame([_dotted(line) for line in self], None)


def _dotted(line: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            flat |= _dotted(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _pandas_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> pandas.DataFrame:
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("to_pandas needs pandas; pip install 'agentrl[tables]'") from None
    return pandas.DataFrame(rows, columns=None if columns is None else list(columns))


def _polars_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> polars.DataFrame:
    try:
        import polars  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("to_polars needs polars; pip install 'agentrl[tables]'") from None
    return polars.DataFrame(rows, schema=columns, infer_schema_length=None)
