"""An episode is shown with its speakers, tokens and numbers; hostile text stays text."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import pytest
from rich.console import Console

from agentrl.episode.show import html_of, print_view, view_of
from agentrl.types import EpisodeFailure, ForkReason, StopReason, Trajectory, Turn, VersionSpan

HOSTILE = "</div><script>alert('x')</script> \x1b[2J\u202e & \ud800"


def turn(text: str, *, parent: int | None = None, fork: ForkReason | None = None, temperature: float = 1.0) -> Turn:
    return Turn(
        context_ids=np.array([5, 6], np.int32),
        output_ids=np.array([7, 8], np.int32),
        output_logprobs=np.log(np.array([0.5, 0.25], np.float32)),
        spans=(VersionSpan(start=0, end=1, version=3), VersionSpan(start=1, end=2, version=4)),
        stop_reason=StopReason.STOP,
        sent_after=0 if parent is None else parent + 1,
        parent=parent,
        fork=fork,
        reward=0.5,
        sent_at=0 if parent is None else 2 * parent + 2,
        rewarded_at=1 if parent is None else 2 * parent + 3,
        player="white",
        temperature=temperature,
        messages=({"role": "user", "content": "2 + 2?"},),
        message={
            "role": "assistant",
            "content": text,
            "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 2}'}}],
        },
    )


def episode(*turns: Turn, failure: EpisodeFailure | None = None) -> Trajectory:
    return Trajectory(
        episode_id="0.0.0",
        task_id="t",
        turns=turns,
        stop_reason=StopReason.COMPLETED,
        final_reward=None if failure else 1.0,
        failure=failure,
    )


def letters(ids: Sequence[int]) -> list[str]:
    return [f"<{number}>" for number in ids]


def printed(trajectory: Trajectory, *, tokens: bool = False, advantages: Sequence[float | None] | None = None) -> str:
    out = io.StringIO()
    view = view_of(trajectory, tokens=tokens, texts=letters, advantages=advantages)
    print_view(view, Console(file=out, width=200))
    return out.getvalue()


def test_a_terminal_shows_speakers_versions_rewards_advantages_and_forks() -> None:
    text = printed(episode(turn("four"), turn("4", parent=0, fork=ForkReason.HISTORY_EDITED)), advantages=[0.25, None])
    assert "user: 2 + 2?" in text
    assert "assistant: four\ncalls add({" in text
    assert "turn 1, player white, continues turn 0, fork: history_edited" in text
    assert text.count("versions 3 to 4") == 2
    assert "mean log-prob -1.040, reward 0.5, advantage +0.25" in text
    assert text.count("advantage") == 1


@pytest.mark.parametrize(("temperature", "in_loss"), [(1.0, "1"), (0.0, "0")])
def test_each_token_is_shown_with_its_mask_version_log_prob_and_probability(temperature: float, in_loss: str) -> None:
    lines = printed(episode(turn("four", temperature=temperature)), tokens=True).splitlines()
    [row] = [line.split() for line in lines if line.strip().startswith("<8>")]
    assert row == ["<8>", in_loss, "4", "-1.386", "0.250"]
    assert any(line.split() == ["<5>", "<6>", "0", "2", "of", "context"] for line in lines)


def test_a_failed_episode_shows_why_and_trains_nothing() -> None:
    failure = EpisodeFailure(kind="WorkflowError", message="lost\x1b[2J", traceback="")
    text = printed(episode(turn("four"), failure=failure))
    assert r"failed: WorkflowError: lost\x1b[2J" in text
    assert "2 tokens, 0 in the loss" in text


def test_a_notebook_shows_hostile_text_as_text() -> None:
    html = html_of(view_of(episode(turn(HOSTILE)), tokens=True, texts=lambda ids: [HOSTILE] * len(ids)))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert not any(character in html for character in ("\x1b", "\u202e", "\ud800"))
    assert html.count("<div") == html.count("</div>")
    assert "probability 0.250, in the loss" in html


def test_control_characters_never_reach_a_terminal() -> None:
    text = printed(episode(turn(HOSTILE)), tokens=True)
    assert "\x1b[2J" not in text
    assert r"\x1b[2J" in text


def test_a_trajectory_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    trajectory = episode(turn("four"))
    trajectory.show(tokens=True)
    shown = capsys.readouterr().out
    assert "turn 0, player white" in shown
    assert any(line.split()[:2] == ["8", "1"] for line in shown.splitlines()), "without a tokenizer, the id"
    assert "four" in trajectory._repr_html_()  # pyright: ignore[reportPrivateUsage] - the name that notebooks call
