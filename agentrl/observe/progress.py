"""The display of a run: live on a terminal, one line for each step elsewhere.

Invariant: a display never changes the run: it reads snapshots in the event loop and writes to one stream. A stream that
cannot be written ends the display, and nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Protocol, TextIO

import anyio
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.support.foreign import visible

REFRESH_S = 0.5
"""Seconds between two pictures of the live display."""
QUIET_S = 30.0
"""After so many seconds without a line, a log tells how far the run is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The present state of a run. Rates are of the last training step; None before the first."""

    name: str
    step: int
    steps: int
    policy_version: int
    wall_s: float
    max_staleness: int
    step_s: float | None = None
    """Seconds that a step takes lately."""
    sampled_tokens: int = 0
    episodes_in_flight: int = 0
    groups_complete: int = 0
    groups_outstanding: int = 0
    failed_episodes: int = 0
    dropped_groups: int = 0
    success_rate: float | None = None
    return_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    tokens_per_s: float | None = None
    signal_share: float | None = None
    """Share of groups whose returns differ."""
    last_evaluation: str | None = None
    """As `evaluation_line` returns it."""
    waits: tuple[str, ...] = ()
    """The present waits, the longest first."""

    @property
    def eta_s(self) -> float | None:
        """Seconds left if the remaining steps take as long as the last ones; None before the first step."""
        return None if self.step_s is None else self.step_s * (self.steps - self.step)


class StepPace:
    """What a step takes lately: the start of the servers, and the wait for the first batch alone, are no part of it."""

    WINDOW = 16
    """Number of the last steps that count."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=self.WINDOW + 1)
        self._first_s: float | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None before the first."""
        if len(self._ends) < 2:
            return self._first_s
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def ended(self, moment: float, *, first_s: float) -> None:
        """Count a step that ended at `moment`, seconds; `first_s` is the estimate that holds until another one has ended."""
        self._ends.append(moment)
        self._first_s = self._first_s or first_s


class Progress(Protocol):
    """Shows a run to a person."""

    async def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Show the run until cancelled; the terminal is then given back, with the display as it is."""
        ...

    def step(self, snapshot: Snapshot) -> None:
        """Show that a training step has ended."""
        ...

    def evaluation(self, line: str) -> None:
        """Show that an evaluation has ended; `line` is its result."""
        ...

    def end(self, summary: str) -> None:
        """Show the summary of a run that has ended."""
        ...


class PlainProgress:
    """One line for each step and each evaluation, and one where there was none for `QUIET_S` seconds."""

    def __init__(self, stream: TextIO | None = None, *, quiet_s: float = QUIET_S) -> None:
        self._stream = stream or sys.stderr
        self._broken = False
        self._quiet_s = quiet_s
        self._last = time.monotonic()

    async def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Write a line whenever there was none for long, until cancelled; the other lines come from `step`."""
        self._last = time.monotonic()
        while True:
            await anyio.sleep(max(0.0, self._last + self._quiet_s - time.monotonic()))
            if time.monotonic() >= self._last + self._quiet_s:
                self._write(quiet_line(snapshot()))

    def step(self, snapshot: Snapshot) -> None:
        self._write(step_line(snapshot))

    def evaluation(self, line: str) -> None:
        self._write(line)

    def end(self, summary: str) -> None:
        self._write(summary)

    def _write(self, text: str) -> None:
        self._last = time.monotonic()
        if self._broken:
            return
        try:
            self._stream.write(f"{visible(text)}\n")
            self._stream.flush()
        except (OSError, ValueError):  # its reader is gone, its disk is full, or it is closed
            self._broken = True
            abandon(self._stream)


class LiveProgress:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)

    async def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Redraw every `REFRESH_S` seconds until cancelled; the last picture stays on the screen."""
        try:
            await self._draw(snapshot)
        except (OSError, ValueError, SystemExit):  # the terminal is gone; rich makes an exit of a broken pipe
            abandon(self._console.file)

    async def _draw(self, snapshot: Callable[[], Snapshot]) -> None:
        with Live(console=self._console, auto_refresh=False) as live:
            try:
                while True:
                    live.update(picture(snapshot()), refresh=True)
                    await anyio.sleep(REFRESH_S)
            finally:
                live.update(picture(snapshot()), refresh=True)

    def step(self, snapshot: Snapshot) -> None:
        """Nothing: the next picture shows it."""

    def evaluation(self, line: str) -> None:
        """Nothing: the next picture shows it."""

    def end(self, summary: str) -> None:
        """Print the summary below the last picture."""
        try:
            self._console.print(visible(summary), markup=False, highlight=False, soft_wrap=True)
        except (OSError, ValueError, SystemExit):
            abandon(self._console.file)


class NoProgress:
    """Shows nothing."""

    async def show(self, snapshot: Callable[[], Snapshot]) -> None:
        """Return at once."""

    def step(self, snapshot: Snapshot) -> None:
        """Nothing."""

    def evaluation(self, line: str) -> None:
        """Nothing."""

    def end(self, summary: str) -> None:
        """Nothing."""


def make_progress(stream: TextIO | None = None) -> Progress:
    """Return a live display when `stream` (standard error by default) is a terminal, plain lines otherwise.

    Without a standard error nothing is shown.
    """
    target = stream or sys.stderr
    if target is None:  # pyright: ignore[reportUnnecessaryComparison] - so where a shell closes it, with 2>&-
        return NoProgress()
    return LiveProgress(Console(file=target)) if target.isatty() else PlainProgress(target)


def abandon(stream: IO[str]) -> None:
    """Let what is still written to `stream`, such as Python's own flush at the end, go nowhere instead of failing."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def step_line(s: Snapshot) -> str:
    """Return a step as one line of text.

    Example:
        >>> step_line(Snapshot(name="r", step=2, steps=10, policy_version=2, wall_s=8.0, max_staleness=2, step_s=3.0))
        'step 2/10, version 2, 0 failed, 0 dropped, 8 s, about 24 s left'
    """
    parts = [f"step {s.step}/{s.steps}", f"version {s.policy_version}"]
    if s.success_rate is not None:
        parts.append(f"success {s.success_rate:.3f}")
    if s.return_mean is not None:
        parts.append(f"return {s.return_mean:+.3f}")
    if s.signal_share is not None:
        parts.append(f"signal {s.signal_share:.0%}")
    if s.staleness_mean is not None:
        parts.append(f"staleness mean {s.staleness_mean:.2f} max {s.staleness_max:g} of {s.max_staleness}")
    if s.tokens_per_s:  # the last step may have sampled nothing
        parts.append(f"{s.tokens_per_s:.0f} tokens/s")
    parts += [f"{s.failed_episodes} failed", f"{s.dropped_groups} dropped", f"{s.wall_s:.0f} s"]
    if s.eta_s is not None:
        parts.append(f"about {duration_text(s.eta_s)} left")
    return ", ".join(parts)


def quiet_line(s: Snapshot) -> str:
    """Return how far a run is between two steps.

    Example:
        >>> run = Snapshot(name="r", step=0, steps=9, policy_version=1, wall_s=42.0, max_staleness=1, groups_outstanding=4)
        >>> quiet_line(run)
        'step 1/9 is under way: 0 of 4 open groups complete, 0 episodes in flight, 42 s'
    """
    number = f"step {s.step + 1}/{s.steps} is under way" if s.step < s.steps else f"all {s.steps} steps are done"
    doing = f"{s.groups_complete} of {s.groups_outstanding} open groups complete, {s.episodes_in_flight} episodes in flight"
    if not s.groups_outstanding and s.waits:
        doing = s.waits[0]
    left = "" if s.eta_s is None or s.step == s.steps else f", about {duration_text(s.eta_s)} left"
    return f"{number}: {doing}, {s.wall_s:.0f} s{left}"


def evaluation_line(line: Mapping[str, object]) -> str:
    """Return the `evaluation` event of a run as one line of text.

    Example:
        >>> result = {"success_rate": 0.75, "return_mean": 0.5}
        >>> evaluation_line({"step": 20, "episodes": 64, "failed": 1, "seconds": 8.1, **result})
        'evaluation after step 20: success 0.750, return +0.500, 1 of 64 episodes failed, 8 s'
    """
    result = (
        f"success {line['success_rate']:.3f}, return {line['return_mean']:+.3f}" if "success_rate" in line else "no result"
    )
    failed = f"{line['failed']} of {line['episodes']} episodes failed"
    return f"evaluation after step {line['step']}: {result}, {failed}, {line['seconds']:.0f} s"


def picture(s: Snapshot) -> Group:
    """Return the live display of `s`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    eta = f", about {duration_text(s.eta_s)} left" if s.eta_s is not None else ""
    table.add_row(s.name, f"step {s.step}/{s.steps}, version {s.policy_version}, {duration_text(s.wall_s)}{eta}")
    if s.success_rate is not None:
        signal = f", {s.signal_share:.0%} of the groups carry a signal" if s.signal_share is not None else ""
        reward = f", return {s.return_mean:+.3f}" if s.return_mean is not None else ""
        table.add_row("success", f"{s.success_rate:.3f}{reward}{signal}")
    if s.staleness_mean is not None:
        table.add_row("staleness", f"mean {s.staleness_mean:.2f}, max {s.staleness_max:g}, bound {s.max_staleness}")
    rate = f"{s.tokens_per_s:.0f} a second, " if s.tokens_per_s else ""
    table.add_row("tokens", f"{rate}{s.sampled_tokens} in all")
    table.add_row(
        "rollout",
        f"{s.episodes_in_flight} episodes in flight, {s.groups_complete} of {s.groups_outstanding} open groups complete, "
        f"{s.failed_episodes} episodes failed, {s.dropped_groups} groups dropped",
    )
    if s.last_evaluation is not None:
        table.add_row("evaluation", s.last_evaluation.removeprefix("evaluation "))
    waits = [Text(f"  {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in s.waits[:4]]
    return Group(ProgressBar(total=s.steps, completed=s.step, width=60), table, *waits)


def duration_text(seconds: float) -> str:
    """Return a duration as text.

    Example:
        >>> duration_text(7.4), duration_text(75), duration_text(7500)
        ('7 s', '1 min 15 s', '2 h 05 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
