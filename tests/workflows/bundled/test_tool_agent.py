"""The tool agent: functions of the user as tools and grader, toolboxes that are opened, and faults that are no rewards."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task
from agentrl_workflows.tool_agent import ToolAgent
from tests.support import toolbox
from tests.support.player import Player, tool_call

HERE = "tests.support.toolbox"
GRADER = f"{HERE}:says_the_answer"
TASK = Task(id="v", data={"question": "How many people are in two countries like Velmara?", "answer": 82_000})


async def test_functions_and_lists_of_functions_are_tools_and_a_function_grades(play: Player) -> None:
    right = [
        tool_call("population", country="Velmara") + "\n" + tool_call("population", country="Atlantis"),
        tool_call("add", a=41_000, b=41_000),
        "It is 82000.",
    ]
    endless = [tool_call("add", a=1, b=1)] * 3
    workflow = ToolAgent(grader=GRADER, tools=[f"{HERE}:BOTH"], max_turns=3, system="Use the tools.")
    solved, unanswered = await play.all(workflow, TASK, right, endless)
    assert (solved.final_reward, solved.failure) == (1.0, None)
    assert solved.metrics == {"tool_calls": 3.0, "tool_errors": 1.0, "answered": 1.0}
    first, known, added = play.read(solved)
    assert "Use the tools." in first
    assert "41000" in known
    assert "Error: nothing is known of Atlantis" in known
    assert "82000" in added
    verify(solved)
    assert (unanswered.final_reward, unanswered.metrics["answered"]) == (0.0, 0.0)


async def test_a_toolbox_is_opened_once_for_all_episodes_and_closed(play: Player) -> None:
    toolbox.EVENTS.clear()
    workflow = ToolAgent(grader=GRADER, tools=[f"{HERE}:add"], toolboxes=[f"{HERE}:server"])
    script = [tool_call("farther"), "82000"]
    episodes = await play.all(workflow, TASK, script, script)
    assert [episode.final_reward for episode in episodes] == [1.0, 1.0]
    assert "from afar" in play.read(episodes[0])[1]
    assert toolbox.EVENTS == ["opened", "closed"]


@pytest.mark.parametrize(
    ("arguments", "script", "reason", "message"),
    [
        ({"grader": GRADER, "tools": [f"{HERE}:breaks"]}, [tool_call("breaks"), "1"], "environment_fault", "HTTP 503"),
        ({"grader": f"{HERE}:judge_is_gone"}, ["1"], "environment_fault", "grader raised ConnectionError: HTTP 503"),
        ({"grader": f"{HERE}:grades_with_text"}, ["1"], "workflow_error", "a reward must be a finite number, got str"),
    ],
)
async def test_a_tool_or_grader_that_breaks_is_a_failure_and_no_reward(
    play: Player, arguments: dict[str, Any], script: list[str], reason: str, message: str
) -> None:
    episode = await play(ToolAgent(**arguments), TASK, *script)
    assert (episode.stop_reason, episode.final_reward) == (StopReason(reason), None)
    assert episode.failure is not None
    assert message in episode.failure.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grader": "says_the_answer"}, "grader: expected module:name"),
        ({"grader": f"{HERE}:missing"}, "has no 'missing'"),
        ({"grader": "no.such.module:f"}, "there is no module"),
        ({"grader": f"{HERE}:NOTHING"}, "is not callable"),
        ({"grader": GRADER, "tools": [f"{HERE}:NOTHING"]}, "expected a function, a tool or a list"),
        ({"grader": GRADER, "tools": [f"{HERE}:variadic"]}, "name every parameter"),
        ({"grader": GRADER, "tools": [f"{HERE}:add", f"{HERE}:BOTH"]}, "two tools have the name 'add'"),
        ({"grader": GRADER, "max_turns": 0}, "max_turns must be at least 1"),
    ],
)
def test_a_run_file_that_names_no_tool_or_grader_is_refused_before_the_run(arguments: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match=message):
        ToolAgent(**arguments)


async def test_tools_of_a_toolbox_may_not_repeat_a_name(play: Player) -> None:
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        await play(ToolAgent(grader=GRADER, tools=[f"{HERE}:add"], toolboxes=[f"{HERE}:second_add"]), TASK, "1")
