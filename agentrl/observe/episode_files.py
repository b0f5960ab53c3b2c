"""The folder `episodes/` of a run: full records by step, an index of all episodes, and what each step trained.

- `step-000007.jsonl`: the records (`RecordedEpisode`) of the episodes that ended while step 7 was the next to complete. When
  the step has ended, a thread compresses the file to `step-000007.jsonl.gz`.
- `index.jsonl`: one line (`EpisodeSummary`) for each finished attempt; nothing is ever taken out.
- `trained-000007.jsonl.gz`: one line (`TrainedEpisode`) for each episode in the batch of step 7.

The first line of each file is a header with its format and version. With `keep_steps`, the files of earlier steps are
deleted; where one holds evaluations, their records stay, and the lines of the others become empty.

Invariant: a line is whole or absent, and lines keep the order of the calls. A record is written before its index line, so
each index line has its record. After `close`, each earlier record is on disk, also when the run is cancelled; where the disk
is too slow for that, `close` raises an error with the count of the records that are lost. A file exists compressed or plain,
whatever moment a process dies at. A disk that refuses a line stops the run with an error that names the cause.
"""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import anyio
import anyio.to_thread
import msgspec

from agentrl.episode.codec import encode_line, trajectory_record
from agentrl.episode.summary import EPISODES_HEADER, INDEX_HEADER, TRAINED_HEADER, EndedEpisode, summarize
from agentrl.errors import RunStopped
from agentrl.observe.records import JsonLines, cannot_write
from agentrl.support.concurrency import task_group

DRAIN_TIMEOUT_S = 20.0
"""Seconds that a run that ends waits until its last lines are on disk: a disk that others write to pauses for some."""
MAX_PENDING_RECORDS = 8192
"""Records that may wait for the disk."""
_MAX_BATCH = 16
"""Records that are in memory as text at a time."""
COMPRESSION = 1
"""Level of gzip: higher ones make the files a tenth smaller and take four times as long."""
_EVALUATION = b'{"purpose":"evaluation"'


class _StepEnd(NamedTuple):
    step: int
    trained: Callable[[], Iterable[Mapping[str, object]]]


_Pending: TypeAlias = EndedEpisode | _StepEnd


class EpisodeFiles:
    """The writer of `episodes/`: `put` never waits; encoding, writing and compressing happen in threads.

    The owner runs `write` as a task while records come, and awaits `close` afterwards.
    """

    def __init__(
        self,
        folder: Path,
        *,
        next_step: int,
        keep_steps: int | None = None,
        mark: Mapping[str, object] | None = None,
        drain_timeout_s: float = DRAIN_TIMEOUT_S,
    ) -> None:
        """Open the index for appending.

        `mark` is the line of a resumed run: readers leave out the episodes that it takes back; None: the run is new. `close`
        begins nothing more after `drain_timeout_s` seconds.
        """
        self._folder, self._step, self._keep_steps = folder, next_step, keep_steps
        self._drain_timeout_s = drain_timeout_s
        self._index = JsonLines(folder / "index.jsonl", header=INDEX_HEADER)
        if mark is not None:
            self._index.append({"event": "resumed", **mark})
        self._records: JsonLines | None = None
        self._next_line = 0
        self._pending: list[_Pending] = []
        self._more = anyio.Event()
        self._writing = anyio.Lock()  # two tasks that wrote the same records would write them twice
        self._ended = self._left_by_an_earlier_process()
        self._step_ended = anyio.Event()
        if self._ended:
            self._step_ended.set()

    def put(self, ended: EndedEpisode) -> None:
        """Queue a finished attempt."""
        if len(self._pending) >= MAX_PENDING_RECORDS:
            raise RunStopped(f"{self._folder}: {MAX_PENDING_RECORDS} records wait for the disk, which does not keep up")
        self._pending.append(ended)
        self._more.set()

    def end_step(self, step: int, trained: Callable[[], Iterable[Mapping[str, object]]]) -> None:
        """Queue the end of `step`: later attempts belong to the next one; `trained` is called in a thread."""
        self._pending.append(_StepEnd(step, trained))
        self._more.set()

    async def check_in_place(self) -> None:
        """Check that the files that are written are still those that their paths name."""
        async with self._writing:
            self._index.check_in_place()
            if self._records is not None:
                self._records.check_in_place()

    async def write(self) -> None:
        """Write queued records, and compress the files of ended steps, until cancelled.

        Cancellation: the present batch, and the present file, is finished; `close` writes the later records.
        """
        async with task_group() as tasks:
            tasks.start_soon(self._write_records)
            tasks.start_soon(self._settle_steps)

    async def flush(self) -> None:
        """Return when every record so far is in its file.

        Cancellation: as for `write`.
        """
        await self._drain()

    async def close(self) -> None:
        """Write the remaining records, compress the files of ended steps while there is time, and close the files.

        Cancellation: shielded; begins nothing after `drain_timeout_s`. A file that is left plain is compressed by the
            process that resumes the run.
        """
        try:
            with anyio.move_on_after(self._drain_timeout_s, shield=True):
                await self._drain()
                await self._settle_all()
            if self._pending:
                raise RunStopped(
                    f"{self._folder}: {len(self._pending)} records were not on disk {self._drain_timeout_s:g} s after the "
                    "run ended, and are lost; the disk is too slow for this run"
                )
        finally:
            self._index.close()
            if self._records is not None:
                self._records.close()

    async def _write_records(self) -> None:
        while True:
            await self._more.wait()
            self._more = anyio.Event()
            await self._drain()

    async def _settle_steps(self) -> None:
        while True:
            await self._step_ended.wait()
            self._step_ended = anyio.Event()
            await self._settle_all()

    async def _drain(self) -> None:
        async with self._writing:
            while batch := self._next_batch():
                # A cancellation arrives before the thread starts, and nothing is lost, or after it has ended: a line is
                # never cut in two, nor written twice.
                await anyio.to_thread.run_sync(self._write_batch, batch)
                del self._pending[: len(batch)]
                if isinstance(batch[0], _StepEnd):
                    self._ended.append(batch[0].step)
                    self._step_ended.set()

    def _next_batch(self) -> list[_Pending]:
        """Return episodes that wait before the next end of a step, or that end."""
        ends = (number for number, each in enumerate(self._pending) if isinstance(each, _StepEnd))
        return self._pending[: min(_MAX_BATCH, max(1, next(ends, len(self._pending))))]

    def _write_batch(self, batch: list[_Pending]) -> None:
        records: list[bytes] = []
        summaries: list[bytes] = []
        file = None
        for each in batch:
            if isinstance(each, _StepEnd):
                return self._end_step(each)
            file = self._records or self._open_step()
            name, line = file.path.name.removesuffix(".jsonl"), self._next_line + len(records)
            records.append(encode_line(trajectory_record(each)))
            summaries.append(encode_line(msgspec.structs.asdict(summarize(each, file=name, line=line))))
        if file is not None:
            file.append_bytes(b"".join(records))
            self._next_line += len(records)
            self._index.append_bytes(b"".join(summaries))
        return None

    def _open_step(self) -> JsonLines:
        path = step_file(self._folder, self._step)
        try:
            _restore_plain(path)
            file = self._records = JsonLines(path, header=EPISODES_HEADER)
            with path.open("rb") as lines:
                self._next_line = sum(1 for _ in lines)
        except OSError as error:
            self._index.check_in_place()  # names the cause where the folder was deleted
            raise cannot_write(path, error) from error
        except RunStopped:
            self._index.check_in_place()
            raise
        return file

    def _end_step(self, end: _StepEnd) -> None:
        path = trained_file(self._folder, end.step)
        lines = [encode_line(TRAINED_HEADER), *map(encode_line, end.trained())]
        try:
            _write_compressed(lines, path)
        except OSError as error:
            self._index.check_in_place()  # names the cause where the folder was deleted
            raise cannot_write(path, error) from error
        if self._records is not None:
            self._records.close()
            self._records = None
        self._step = end.step + 1

    async def _settle_all(self) -> None:
        while self._ended:
            await anyio.to_thread.run_sync(self._settle, self._ended[0])
            del self._ended[0]

    def _settle(self, step: int) -> None:
        """Compress the file of an ended step, and prune the step that is now too far behind."""
        path = step_file(self._folder, step)
        try:
            if path.is_file():
                with path.open("rb") as lines:
                    _write_compressed(lines, _compressed(path))
                path.unlink()
            if self._keep_steps is not None:
                _prune(self._folder, step - self._keep_steps)
        except OSError as error:
            self._index.check_in_place()
            raise cannot_write(_compressed(path), error) from error

    def _left_by_an_earlier_process(self) -> list[int]:
        """Return the steps before the present one that an earlier process left to compress or to prune.

        What a lost step trained is deleted: its episodes run again under the same ids.
        """
        for path in self._folder.glob("trained-*.jsonl.gz"):
            if _step_of(path) >= self._step:
                path.unlink()
        steps = {_step_of(path) for path in self._folder.glob("step-*.jsonl*")}
        plain = {_step_of(path) for path in self._folder.glob("step-*.jsonl")}
        keep = self._keep_steps
        old = set[int]() if keep is None else {step + keep for step in steps if step + keep < self._step}
        return sorted(step for step in plain | old if step < self._step)


def step_file(folder: Path, step: int) -> Path:
    """Return the path of the plain file of a step; the compressed one has `.gz` after it."""
    return folder / f"step-{step:06d}.jsonl"


def trained_file(folder: Path, step: int) -> Path:
    """Return the path of the file that lists what a step trained."""
    return folder / f"trained-{step:06d}.jsonl.gz"


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file that is there plain or compressed; half a line at the end is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        file = gzip.open(_compressed(path), "rb")  # noqa: SIM115 - closed below
    with file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _prune(folder: Path, step: int) -> None:
    path = step_file(folder, step)
    trained_file(folder, step).unlink(missing_ok=True)
    if not _compressed(path).exists():
        return
    lines = [line if number == 0 or line.startswith(_EVALUATION) else b"\n" for number, line in enumerate(read_lines(path))]
    if all(line == b"\n" for line in lines[1:]):
        _compressed(path).unlink()
    else:
        _write_compressed(lines, _compressed(path))


def _write_compressed(lines: Iterable[bytes], path: Path) -> None:
    """Write a compressed file that appears whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=COMPRESSION, filename="", mtime=0) as packed:
            for line in lines:
                packed.write(line)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _restore_plain(path: Path) -> None:
    """Unpack the compressed file of a step that is written again after a resume."""
    packed = _compressed(path)
    if packed.exists() and not path.exists():
        unfinished = path.with_name(path.name + ".unfinished")
        with gzip.open(packed, "rb") as source, unfinished.open("wb") as target:
            shutil.copyfileobj(source, target)
        unfinished.replace(path)
    packed.unlink(missing_ok=True)


def _compressed(path: Path) -> Path:
    return path.with_name(path.name + ".gz")


def _step_of(path: Path) -> int:
    return int(path.name.partition(".")[0].rpartition("-")[2])
