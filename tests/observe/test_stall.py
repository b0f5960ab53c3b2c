"""The board of waits and the watchdog."""

from __future__ import annotations

import anyio
import pytest

from agentrl.errors import StallError
from agentrl.observe.stall import StallTimer, WaitBoard
from tests.support.scripted import in_virtual_time


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


def test_progress_moves_the_deadline() -> None:
    async def main() -> None:
        dog = StallTimer(timeout_s=20, describe=lambda: "")
        dog.progress()  # before it watches: nothing to move

        async def watch() -> None:
            with pytest.raises(StallError):
                await dog.watch()

        began = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            for _ in range(12):
                await anyio.sleep(5)
                dog.progress()
        assert anyio.current_time() - began >= 80

    in_virtual_time(main)


def test_standing_still_is_no_stall_while_the_run_waits_for_people() -> None:
    async def main() -> None:
        asked: list[float] = []

        def is_idle() -> bool:
            asked.append(anyio.current_time() - began)
            return len(asked) < 3

        dog = StallTimer(timeout_s=20, describe=lambda: "", is_idle=is_idle)
        began = anyio.current_time()
        with pytest.raises(StallError):
            await dog.watch()
        assert [round(moment) for moment in asked] == [21, 42, 63]

    in_virtual_time(main)
