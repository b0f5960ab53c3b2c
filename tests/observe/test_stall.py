"""The board of waits and the watchdog."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest

from agentrl.errors import StallError
from agentrl.observe.stall import StallTimer, WaitBoard


def test_the_board_shows_the_longest_wait_first_and_forgets_those_that_are_over() -> None:
    now = [0.0]
    board = WaitBoard(now=lambda: now[0])
    with board.waiting("the trainer", lambda: f"batch at {now[0]:g}"):
        now[0] = 5.0
        with board.waiting("the dispatcher", "a slot"):
            now[0] = 7.0
            assert board.lines() == [
                "the trainer waits for batch at 7 since 7.0 s",
                "the dispatcher waits for a slot since 2.0 s",
            ]
        assert len(board.lines()) == 1
    assert board.lines() == []


async def test_the_watchdog_says_who_waits_when_nothing_moves() -> None:
    dog = StallTimer(timeout_s=0.02, describe=lambda: "the trainer waits for group 17")
    with pytest.raises(StallError, match=r"nothing has moved for 0\.02 s\.\nthe trainer waits for group 17"):
        await dog.watch()


async def test_progress_moves_the_deadline() -> None:
    dog = StallTimer(timeout_s=0.2, describe=lambda: "")
    dog.progress()  # before it watches: nothing to move
    moved, stalled = [anyio.current_time()], list[float]()

    async def watch() -> None:
        with pytest.raises(StallError):
            await dog.watch()
        stalled.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        for _ in range(12):
            await anyio.sleep(0.05)
            moved.append(anyio.current_time())  # before: a pause between the two lines must not make the wait look shorter
            dog.progress()
    # On a machine so busy that nothing moved for a while, it ends there, and rightly so.
    times = [*(moment for moment in moved if moment < stalled[0]), stalled[0]]
    assert max(after - before for before, after in pairwise(times)) >= 0.2
