"""Text from outside, on a terminal."""

from __future__ import annotations

import logging

import pytest

from agentrl.commands.running import run_command
from agentrl.errors import RunStopped, WorkflowError
from agentrl.support.foreign import visible
from agentrl.support.user_code import boundary

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\rover"


def test_every_control_character_but_tab_and_line_feed_becomes_an_escape() -> None:
    assert visible(HOSTILE) == r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e\rover"
    assert visible("a\tb\nc é 漢 🙂") == "a\tb\nc é 漢 🙂"


def test_a_command_prints_no_control_character_of_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise RunStopped(HOSTILE)

    with pytest.raises(SystemExit):
        run_command(command)
    assert "\x1b" not in (printed := capsys.readouterr().err)
    assert r"\x1b[2J" in printed


def test_the_log_of_a_command_prints_no_control_character(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        assert logging.lastResort is not None
        logging.lastResort.handle(logging.LogRecord("agentrl", logging.WARNING, "", 0, "%s", (HOSTILE,), None))

    assert logging.lastResort is not None
    logging.lastResort.setFormatter(None)
    run_command(command)
    assert "\x1b" not in (printed := capsys.readouterr().err)
    assert r"\x1b[2J" in printed


def test_an_error_of_foreign_code_keeps_no_more_of_a_huge_text_than_its_beginning_and_end() -> None:
    with pytest.raises(WorkflowError) as caught, boundary(WorkflowError, "Agent.run"):
        raise ValueError("begin\x1b" + "x" * 5_000_000 + "end")
    assert str(caught.value).startswith(r"Agent.run raised ValueError: begin\x1bxxx")
    assert str(caught.value).endswith("xxxend")
    assert len(str(caught.value)) < 20_000
