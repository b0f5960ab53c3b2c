"""The progress bar of commands that run a known number of episodes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.types import Trajectory


class EpisodeBar:
    """A progress bar on standard error when that is a terminal; entering it returns what to call with each episode."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("episodes", total=total)

    def __enter__(self) -> Callable[[Trajectory], None]:
        self._progress.start()
        return self._advance

    def __exit__(self, *_error: object) -> None:
        with suppress(OSError):
            self._progress.stop()

    def _advance(self, _episode: Trajectory) -> None:
        with suppress(OSError):  # a terminal that is gone does not end the command
            self._progress.advance(self._task)
