"""How far an evaluation is: a bar on a terminal, a line at its start and at each quarter elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.observe.progress import duration_text

_PARTS = 4
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())


@contextmanager
def episode_progress(label: str, total: int, console: Console | None = None) -> Generator[Callable[[], None]]:
    """Show `total` episodes on standard error; the block calls what it is given after each."""
    console = console or Console(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with Progress(*_COLUMNS, console=console) as progress:
            bar = progress.add_task(label, total=total)
            yield lambda: progress.advance(bar)
        return
    began, done = time.perf_counter(), 0
    console.print(f"{label}: {total} episodes", highlight=False)

    def advance() -> None:
        nonlocal done
        done += 1
        if done * _PARTS // total > (done - 1) * _PARTS // total:
            seconds = time.perf_counter() - began
            left = "" if done == total else f", about {duration_text(seconds / done * (total - done))} left"
            console.print(f"{label}: {done} of {total} episodes, {duration_text(seconds)}{left}", highlight=False)

    yield advance
