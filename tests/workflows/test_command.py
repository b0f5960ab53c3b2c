"""Agents that are programs of their own: their rewards, their ends, and what they leave behind."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.processes.marked import marked_processes
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Trajectory
from agentrl.workflow import load_workflow
from agentrl_testing import call, play

TASK: dict[str, Any] = {"id": "t1", "question": 'Say "42"; it\'s $HOME.', "answer": "42"}
ASK = """
ask() {
  curl -sS --json "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}]}" "$OPENAI_BASE_URL/chat/completions"
}
reward() { curl -sS --json "$1" "$AGENTRL_REWARD_URL"; }
"""


def ran(script: str, replies: list[Any] | None = None, **settings: Any) -> Trajectory:  # noqa: ANN401
    """Play an episode whose agent is a shell script."""
    given = {"command": ["sh", "-euc", ASK + script], **settings}
    return play(load_workflow(COMMAND, given), TASK, replies or [])


COMMAND = "agentrl_workflows.command:CommandWorkflow"


@pytest.mark.starts
def test_a_shell_script_with_curl_is_an_agent_whose_result_file_is_the_reward() -> None:
    script = "ask one; ask two > answer.json; grep -q 42 answer.json && echo '{\"reward\": 0.75}' > reward.json"
    found = ran(script, ["41", "42"], result="reward.json")
    assert found.failure is None
    assert [turn.message["content"] for turn in found.turns] == ["41", "42"]
    assert (found.final_reward, found.stop_reason) == (0.75, StopReason.COMPLETED)
    verify(found)


@pytest.mark.starts
def test_a_program_that_the_run_file_trusts_posts_its_reward() -> None:
    script = """ask one; reward '{"reward": {"right": 1, "slow": -0.5}}'; echo 9 > reward.json"""
    found = ran(script, ["41"], rewards="all")
    assert (found.final_reward, found.reward_parts) == (0.5, {"right": 1.0, "slow": -0.5})


@pytest.mark.starts
def test_a_program_rewards_single_answers_by_their_ids() -> None:
    script = """
    id=$(ask one | sed 's/.*"id":"\\([^"]*\\)".*/\\1/')
    reward "{\\"reward\\": 0.25, \\"response_id\\": \\"$id\\"}"; reward '{"reward": 1}'
    """
    found = ran(script, ["41"], rewards="all")
    assert (found.turns[0].reward, found.final_reward) == (0.25, 1.0)


@pytest.mark.starts
def test_a_grader_gets_what_the_program_printed() -> None:
    found = ran("ask one; echo 'It is 42.'", ["42"], grader="agentrl_workflows.graders:number_matches")
    assert found.final_reward == 1.0


@pytest.mark.starts
@pytest.mark.parametrize(("status", "reward"), [(0, 1.0), (3, -1.0)])
def test_an_exit_status_may_name_the_reward(status: int, reward: float) -> None:
    assert ran(f"ask one; exit {status}", ["42"], exit_rewards={0: 1.0, 3: -1.0}).final_reward == reward


@pytest.mark.starts
def test_a_run_file_says_which_agents_are_branches_and_which_calls_are_left_out_of_training() -> None:
    script = """
    say() { curl -sS -A "cli/1.0 (x)" -H "x-claude-code-agent-id: $2" "$ANTHROPIC_BASE_URL/v1/messages" --json "{
      \\"model\\": \\"$1\\", \\"max_tokens\\": 9, \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"hi $2\\"}]}"; }
    say small ''; say big ''; say big a1; say big a2
    """
    rules = {"branches": ["subagent"], "side_calls": {"models": ["small"], "answer": "policy"}}
    found = ran(script, ["title", "plan", "one", "two"], exit_rewards={0: 1.0}, **rules)
    assert found.failure is None
    told = [(turn.client, turn.role, turn.branch, turn.left_out) for turn in found.turns]
    assert told == [
        ("cli/1.0", "side_call", (), True),
        ("cli/1.0", "", (), False),
        ("cli/1.0", "subagent", (0,), False),
        ("cli/1.0", "subagent", (1,), False),
    ]
    verify(found)


@pytest.mark.starts
def test_the_task_is_a_file_without_its_answer_and_words_stand_for_its_fields() -> None:
    words = ["sh", "-c", 'cat task.json; printf "\\n%s\\n%s\\n" "$1" "$WHO"; pwd', "sh", "{task.question}"]
    found = load_workflow(
        COMMAND,
        {"command": words, "env": {"WHO": "{task.id}/{door.key}"}, "grader": f"{__name__}:shown", "no_call": "allow"},
    )
    ended = play(found, TASK, [])
    assert ended.failure is None
    assert ended.final_reward == 1.0


def shown(text: str, task: Any) -> float:  # noqa: ANN401
    """Check what the program of the test above printed."""
    data, question, who, place = text.splitlines()
    assert json.loads(data) == {"id": "t1", "question": TASK["question"]}
    assert question == TASK["question"]
    assert who.startswith("t1/")
    assert [path.name for path in Path(place).iterdir()] == ["task.json"]
    return 1.0


@pytest.mark.starts
def test_the_working_directory_begins_with_that_of_the_task_and_leaves_it_alone(tmp_path: Path) -> None:
    source = tmp_path / "t1"
    (source / "src").mkdir(parents=True)
    (source / "src" / "a.txt").write_text("42")
    script = "mv src/a.txt b.txt; cp b.txt reward.json"
    assert ran(script, directory=f"{tmp_path}/{{task.id}}", result="reward.json", no_call="allow").final_reward == 42
    assert (source / "src" / "a.txt").read_text() == "42"
    assert not (source / "b.txt").exists()


@pytest.mark.starts
def test_the_program_sees_no_variable_of_this_process_that_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "1")
    monkeypatch.setenv("SOME_SETTING", "1")
    script = 'test -z "${SOME_SECRET:-}" && test "$SOME_SETTING" = 1'
    assert ran(script, inherit=["SOME_SETTING"], exit_rewards={0: 1.0}, no_call="allow").final_reward == 1.0


@pytest.mark.starts
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo broken >&2; exit 7", "exit status 7"),
        ("kill -9 $$", "signal 9"),
        ("yes", "output limit"),
        ("sleep 1000", "timeout limit"),
    ],
)
def test_a_crash_is_a_fault_or_the_reward_that_the_run_file_names(script: str, said: str) -> None:
    settings: dict[str, Any] = {"exit_rewards": {0: 1.0}, "timeout_s": 0.5 if "sleep" in script else 60}
    fault = ran(script, **settings)
    assert fault.failure is not None
    assert fault.failure.kind == "EnvironmentFault"
    assert said in fault.failure.message
    assert fault.final_reward is None
    blamed = ran(script, **settings, no_call="allow", on_crash="reward", crash_reward=-0.5)
    assert blamed.failure is None
    assert (blamed.final_reward, blamed.metrics["crashed"]) == (-0.5, 1.0)


@pytest.mark.starts
@pytest.mark.parametrize(
    "settings",
    [
        {"grader": "agentrl_workflows.graders:number_matches"},
        {"result": "reward.json"},
        {"exit_rewards": {0: 1.0}},
        {"rewards": "all"},
        {"on_crash": "reward", "crash_reward": 1.0, "ok_statuses": [9]},
    ],
    ids=["grader", "result", "exit", "posts", "crash"],
)
def test_a_program_that_never_asks_the_policy_is_a_failure(settings: dict[str, Any]) -> None:
    script = 'echo 42; echo 1 > reward.json; if [ -n "${AGENTRL_REWARD_URL:-}" ]; then reward \'{"reward": 1}\'; fi'
    found = ran(script, **settings)
    assert found.failure is not None
    assert "made no call of the policy" in found.failure.message
    assert "OPENAI_BASE_URL" in found.failure.message
    assert found.final_reward is None
    allowed = ran(script, **settings, no_call="allow")
    assert (allowed.failure, allowed.final_reward) == (None, 1.0)


@pytest.mark.starts
def test_a_program_whose_every_call_is_a_side_call_has_asked_nothing_that_is_trained() -> None:
    rules = {"side_calls": {"prompts": ["one"], "answer": "policy"}}
    found = ran("ask one", ["title"], exit_rewards={0: 1.0}, **rules)
    assert found.failure is not None
    assert "side calls" in found.failure.message


@pytest.mark.starts
def test_a_program_that_names_no_reward_is_a_failure() -> None:
    found = ran("true")
    assert found.failure is not None
    assert "nothing named its reward" in found.failure.message
    assert found.final_reward is None


@pytest.mark.starts
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("true", "left no reward.json"),
        ("echo high > reward.json", "is not JSON"),
        ("echo '\"high\"' > reward.json", "finite number"),
        ("echo 1e999 > reward.json", "finite number"),
        ("mkfifo reward.json", "no plain file"),
        ("mkdir reward.json", "directory"),
        ("ln -s /proc/self/status reward.json", "leads out"),
    ],
)
def test_a_result_file_that_is_no_reward_is_a_failure(script: str, message: str) -> None:
    found = ran(script, result="reward.json")
    assert found.failure is not None
    assert message in found.failure.message
    assert found.final_reward is None


@pytest.mark.starts
def test_a_failed_call_is_the_reason_of_the_crash_after_it() -> None:
    found = ran("ask one; ask two | grep -q choices", ["41"])
    assert found.failure is not None
    assert found.failure.kind == "RequestRejected"


@pytest.mark.starts
@pytest.mark.parametrize("leave", ["sleep 1000 &", "setsid sleep 1000 & true", "(setsid sh -c 'sleep 1000 & sleep 1000' &)"])
def test_nothing_that_the_program_started_is_left(leave: str) -> None:
    script = f'{leave}\necho "\\"$OPENAI_API_KEY\\"" > reward.json'
    found = ran(script, result="reward.json")
    assert found.failure is not None  # the key is no reward, and names the processes
    key = found.failure.message.split("got ")[1].split("'")[1]
    assert len(key) > 30
    assert not marked_processes(key.encode())


@pytest.mark.starts
def test_a_program_that_never_ends_is_ended_with_its_episode() -> None:
    began = time.monotonic()
    found = play(load_workflow(COMMAND, {"command": ["sleep", "1000"]}), TASK, [], timeout=1.0)
    assert time.monotonic() - began < 300
    assert found.stop_reason is StopReason.DEADLINE
    assert found.failure is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "command"),
        ({"command": ["true"], "results": "a"}, "results"),
        ({"command": ["true"], "on_crash": "reward"}, "crash_reward"),
        ({"command": ["true"], "crash_reward": 0.0}, "crash_reward"),
        ({"command": ["true"], "grader": "agentrl_workflows.graders:nothing"}, "nothing"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_workflow(COMMAND, settings)


@pytest.mark.starts
def test_a_word_that_stands_for_nothing_and_a_missing_program_are_named() -> None:
    for command, message in ((["true", "{task.quest}"], r"{task.quest}"), (["./no_such_program"], "no_such_program")):
        found = play(load_workflow(COMMAND, {"command": command}), TASK, [])
        assert found.failure is not None
        assert message in found.failure.message


def test_a_run_file_names_a_command_and_is_written_back_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    run = load_config("examples/command/run.yaml")
    assert run.workflow == COMMAND
    assert load_workflow(run.workflow, run.workflow_args).name == "node"
    assert "agentrl_workflows.command:CommandWorkflow" in run.to_yaml()


@pytest.mark.starts
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_example_in_javascript_calls_its_tool_and_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    run = load_config("examples/command/run.yaml")
    task = {"id": "t1", "question": "What is 6 times 7?", "answer": "42"}
    found = play(
        load_workflow(run.workflow, run.workflow_args),
        task,
        [call("calc", a=6, op="*", b=7), lambda messages: "It is 42."],
    )
    assert found.failure is None
    assert found.final_reward == 1.0
    assert len(found.turns) == 2
    assert len(found.branches()) == 1
    assert found.turns[1].messages[-1]["content"] == "42"
    verify(found)


@pytest.mark.starts
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize(("answers", "reward"), [(["It is 42."], 1.0), (["It is 41.", "42"], 0.7), (["1", "2"], 0.0)])
def test_the_calculator_in_javascript_judges_its_own_answers(
    answers: list[str], reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    run = load_config("examples/gateway/calculator.yaml")
    task = {"id": "t1", "question": "Compute 6 * 7.", "answer": "42", "seed": 0}
    calls = [call("calc", a=6, op="*", b=7), call("calc", a=6, op="plus", b=7)]
    found = play(load_workflow(run.workflow, run.workflow_args), task, [*calls, *answers])
    assert found.failure is None
    assert found.final_reward == reward
    assert [turn.messages[-1]["content"] for turn in found.turns[1:3]] == ["42", "error: bad call"]
    assert len(found.branches()) == 1
    verify(found)
