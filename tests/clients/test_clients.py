"""Real clients, unmodified, play an episode through its door: each does its work, and its record is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.tokens.verify import verify
from tests.clients.catalog import ANSWER, CLIENTS, CONTENT, ClientProgram
from tests.clients.harness import CUT_AT, evidence, play
from tests.clients.table import leave_row

pytestmark = [pytest.mark.clients, pytest.mark.processes]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("program", CLIENTS, ids=lambda program: program.name)
async def test_a_client_does_its_work_and_its_episode_is_recorded_exactly(program: ClientProgram, tmp_path: Path) -> None:
    program.check_installed()
    played = await play(program, tmp_path)
    shown = evidence(played)
    turns = played.trajectory.turns

    assert played.exit_status == 0, shown
    assert (tmp_path / "work" / "hello.txt").read_text() == CONTENT, shown
    assert ANSWER in played.output or ANSWER.encode("ascii", "backslashreplace").decode() in played.output, shown

    verify(played.trajectory)
    assert len(turns) == len(program.replies), shown
    assert played.num_calls == len(turns) + 1, f"the call that was cut was not made again once:\n{shown}"
    assert (played.branches, played.forks) == (program.branches, program.forks), shown

    assert [(span.start, span.version) for span in turns[1].spans] == [(0, 0), (CUT_AT, 1)], shown
    assert [turn.reward for turn in turns] == [None, 0.25, *[None] * (len(turns) - 2)], shown
    assert played.trajectory.final_reward == 1.0, shown
    leave_row(played)
