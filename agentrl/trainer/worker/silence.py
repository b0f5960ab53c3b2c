"""Ranks of a trainer that give no sign of life: the driver warns of one, and ends one that stays silent.

Invariant: a rank is lost only while a request is under way, after `lost_s` in which it has neither given a sign nor, as far
as this machine can see, done anything. Rank 0 gives signs only during a request, the others always.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio

from agentrl.processes.link import TICK_S, LifeSigns

logger = logging.getLogger(__name__)


class Followed(Protocol):
    """A rank whose signs of life are followed, such as a `Link`."""

    where: str
    """For messages, such as `pid 123`."""
    signs: LifeSigns

    def pulse(self) -> int | None:
        """Return a number that grows while the rank works; None: it is stopped, or the driver cannot see its process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RequestUnderWay:
    what: str
    timeout_s: float


class Silences:
    """The silent ones among the ranks of one trainer."""

    def __init__(
        self,
        ranks: Sequence[Followed],
        *,
        silent_s: float,
        lost_s: float | None,
        on_lost: Callable[[int, str], None],
    ) -> None:
        self._ranks, self._on_lost = ranks, on_lost
        self._warn_s = silent_s if lost_s is None else min(silent_s, lost_s)
        self._lost_s = lost_s
        self._since: dict[int, float] = {}
        """Time of the last sign of each silent rank."""
        self._requests: list[_RequestUnderWay] = []
        self._work_began = anyio.Event()

    def name(self, number: int) -> str:
        """Return the name of a rank for messages, after `trainer`."""
        where = self._ranks[number].where
        return f"rank {number} ({where})" if len(self._ranks) > 1 else f"worker ({where})"

    @contextmanager
    def working(self, what: str, timeout_s: float) -> Generator[None]:
        """Mark the block as a request to the ranks, for which they have `timeout_s` seconds."""
        request = _RequestUnderWay(what=what, timeout_s=timeout_s)
        self._requests.append(request)
        self._work_began.set()
        try:
            yield
        finally:
            self._requests.remove(request)
            if not self._requests:
                self._work_began = anyio.Event()

    async def follow(self, number: int) -> None:
        """Report each silence of a rank, until it is lost."""
        is_lost = False
        while not is_lost:
            if number == 0:
                await self._work_began.wait()
            is_lost = await self._wait_for_sign(number)

    def describe(self, *, but: int) -> str:
        """Return the silent ranks except rank `but`, in words; empty where none is."""
        now = anyio.current_time()
        silent = [
            f"{self.name(number)} had given no sign of life for {now - since:.0f} s"
            for number, since in self._since.items()
            if number != but
        ]
        return f"{', '.join(silent)}: it was stopped or hung" if silent else ""

    async def _wait_for_sign(self, number: int) -> bool:
        """Wait for the next sign of a rank, and log when it is late; return whether the rank is lost."""
        rank, tick = self._ranks[number], min(TICK_S, self._warn_s)
        silent = idle = 0.0
        pulse = rank.pulse()
        while not await rank.signs.come_within(tick):
            if number == 0 and not self._requests:
                self._since.pop(0, None)
                return False
            before, pulse = pulse, rank.pulse()
            is_working = pulse is not None and pulse != before
            idle = idle + tick if self._requests and not is_working else 0.0
            silent = 0.0 if is_working and not rank.signs.have_begun else silent + tick  # its start may take long
            if silent >= self._warn_s and number not in self._since:
                self._since[number] = anyio.current_time() - silent
                self._warn(number)
            if self._lost_s is not None and idle >= self._lost_s:
                self._lose(number)
                return True
        if self._since.pop(number, None) is not None:
            logger.warning("the trainer %s gives signs of life again", self.name(number))
        return False

    def _warn(self, number: int) -> None:
        rest = ""
        if self._requests:
            request = self._requests[0]
            limit = f"{request.timeout_s:g} s in all (trainer.call_timeout_s)"
            if self._lost_s is not None and self._lost_s < request.timeout_s:
                limit = f"{self._lost_s:g} s (trainer.collective_timeout_s)"
            rest = f" while {request.what}: it is stopped or hangs; the run waits for it, at most {limit}"
        silent = f"the trainer {self.name(number)} has given no sign of life for {self._warn_s:g} s"
        logger.warning("%s%s", silent, rest or ": it is stopped or hangs")

    def _lose(self, number: int) -> None:
        since = self._since.setdefault(number, anyio.current_time() - (self._lost_s or 0))
        self._on_lost(
            number,
            f"had given no sign of life for {anyio.current_time() - since:.0f} s: it was stopped or hung, so it was killed "
            "(trainer.collective_timeout_s)",
        )
