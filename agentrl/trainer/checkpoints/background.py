"""A checkpoint that is written while training continues.

Invariant: at most one is being written; the copies that it is made of never change. The outcome is the same on every rank
and is given once.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from agentrl.trainer.base import SaveReport
from agentrl.trainer.checkpoints.write import CheckpointJob, write_checkpoint

if TYPE_CHECKING:
    from agentrl.trainer.parallel.ranks import Ranks


class BackgroundWriter:
    """The thread of one rank that writes checkpoints, together with those of the other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        """Start with nothing to write; every rank must make one at the same time."""
        self._ranks = ranks
        self._in_thread = ranks.beside()
        self._threads = ThreadPoolExecutor(1, "agentrl checkpoint")
        self._writing: Future[SaveReport] | None = None

    def start(self, job: CheckpointJob) -> None:
        """Begin to write; after `finish` has given the outcome of the write before."""
        assert self._writing is None
        self._writing = self._threads.submit(self._write, job)

    def finish(self, *, wait: bool) -> SaveReport | None:
        """Return the checkpoint that was started, when all of it is on the disk; every rank must call it.

        Args:
            wait: for its end; otherwise None is returned while it is being written.

        Returns:
            The checkpoint; None also when nothing was started since the last one.

        Raises:
            TrainError: it could not be written; the message names the path and the cause.
        """
        writing = self._writing
        if writing is None:
            return None
        # All ranks wait or none does: what rank 0 says holds for all.
        ready = None if self._ranks.rank else bytes([wait or writing.done()])
        if self._ranks.share(ready) == b"\0":
            return None
        self._writing = None
        return writing.result()

    def close(self) -> None:
        """Return when the checkpoint that is being written, if any, is on the disk or has failed."""
        self._threads.shutdown()

    def _write(self, job: CheckpointJob) -> SaveReport:
        begin = time.perf_counter()
        write_checkpoint(self._in_thread, job)
        return SaveReport(directory=str(job.directory), seconds=time.perf_counter() - begin)
