"""Real clients, unmodified, play an episode through its door: each does its work, and its record is exact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.tokens.verify import verify
from tests.clients.catalog import ANSWER, CLIENTS, CONTENT, ClientProgram, tool_call
from tests.clients.harness import CUT_AT, READ_AGAIN, evidence, play
from tests.clients.table import leave_row, leave_row_of_loss

LOSERS = frozenset(
    (
        "openai-chat",
        "anthropic-loop",
        "openai-agents-responses",
        "AI SDK-chat",
        "Codex",
        "Claude Code",
        "opencode",
        "pi-chat",
        "mini-swe-agent",
    )
)
"""Clients whose answer is lost: those of different makers."""
ODD = ("Codex", "Claude Code", "opencode", "pi", "AI SDK", "openai for JavaScript")
"""Clients that go on after a call of a tool that they do not have."""
pytestmark = [pytest.mark.clients]


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


@pytest.mark.parametrize("program", [each for each in CLIENTS if each.name in LOSERS], ids=lambda program: program.name)
async def test_an_answer_that_is_lost_on_its_way_is_sent_or_sampled_again(program: ClientProgram, tmp_path: Path) -> None:
    program.check_installed()
    played = await play(program, tmp_path, trouble="lost")
    shown = evidence(played)
    turns = played.trajectory.turns

    assert played.exit_status == 0, shown
    assert (tmp_path / "work" / "hello.txt").read_text() == CONTENT, shown
    verify(played.trajectory)
    assert played.num_calls == len(turns), shown
    leave_row_of_loss(played)
    if played.marks_retries:
        assert (len(turns), played.branches, played.metrics["gateway.joined_retries"]) == (3, 1, 1.0), shown
        return
    # Nothing tells a repetition from the wish for another sample: what comes back decides which of the two is continued.
    assert (len(turns), played.branches) == (4, 2), shown
    assert READ_AGAIN in str(turns[2].message), shown
    assert [turn.parent for turn in turns] == [None, 0, 0, 2], shown
    assert turns[3].fork is None, shown


@pytest.mark.parametrize("program", [each for each in CLIENTS if each.client in ODD], ids=lambda program: program.name)
async def test_calls_in_parallel_and_of_an_unknown_tool_stay_one_branch(program: ClientProgram, tmp_path: Path) -> None:
    program.check_installed()
    write, read, answer = program.replies
    twice = f"  {write}\n{write.partition(chr(10))[2]}"
    replies = [twice, tool_call("nosuch_tool", '{"a" :  1.50}'), read, answer]
    played = await play(replace(program, replies=replies), tmp_path)
    shown = evidence(played)

    assert played.exit_status == 0, shown
    assert (tmp_path / "work" / "hello.txt").read_text() == CONTENT, shown
    verify(played.trajectory)
    assert [turn.parent for turn in played.trajectory.turns] == [None, 0, 1, 2], shown
    assert (played.branches, played.forks) == (1, {}), shown
    assert played.resent == (["renamed"] if program.client == "opencode" else []), shown
