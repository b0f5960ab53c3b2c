"""The display of an import: a bar on a terminal, a line at each fourth elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.support.foreign import visible

_PARTS = 4


def say(text: str) -> None:
    """Write one line to standard error."""
    Console(stderr=True, soft_wrap=True).print(visible(text), markup=False, highlight=False)


@contextmanager
def import_bar(name: str, total: int) -> Generator[Callable[[int], None]]:
    """Show the import of a file of `total` weights; the block calls what it is given with the number that were written."""
    columns = (
        TextColumn("importing {task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} % of {task.fields[millions]} M weights"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    console, done = Console(stderr=True), 0
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(visible(name), total=total, millions=f"{total / 1e6:,.1f}")
        if not console.is_terminal:
            say(f"importing {name}: {total / 1e6:,.1f} M weights")

        def advance(count: int) -> None:
            nonlocal done
            before, done = done, done + count
            progress.update(bar, completed=done)
            if not console.is_terminal and done * _PARTS // total > before * _PARTS // total:
                say(f"importing {name}: {done * 100 // total} %")

        yield advance
