"""What is exported as ATIF comes back as it was, and documents of other programs are read as far as they go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given

from agentrl.episode.codec import stored_trajectory
from agentrl.errors import ConfigError
from agentrl_viewer.exchange.atif_read import read_atif
from agentrl_viewer.exchange.atif_write import atif_document
from agentrl_viewer.exchange.foreign_record import ReadEpisode
from tests.support.records import records

FILE = Path("job/add-numbers__x1/agent/trajectory.json")


def document_of(record: dict[str, Any]) -> bytes:
    return atif_document(record, agent="agent:Agent", model="tiny", run="demo")


@given(records())
def test_a_document_that_is_read_again_gives_the_same_episode(record: dict[str, Any]) -> None:
    back = read_atif(document_of(record), FILE)
    assert json.loads(msgspec.json.encode(back.record)) == record
    assert back.closing == {}
    written, read = (stored_trajectory(msgspec.json.encode(each)) for each in (record, back.record))
    assert [read.messages(leaf) for leaf in read.leaves()] == [written.messages(leaf) for leaf in written.leaves()]


@given(records())
def test_every_sampled_token_is_in_one_step_that_is_no_copied_context(record: dict[str, Any]) -> None:
    document = json.loads(document_of(record))
    branches = [document, *document.get("subagent_trajectories", ())]
    steps = [step for branch in branches for step in branch["steps"]]
    sampled = [step["metrics"]["completion_token_ids"] for step in steps if "metrics" in step]
    assert sum(map(len, sampled)) == sum(len(turn["output_ids"]) for turn in record["turns"])
    copied = [step for step in steps if step.get("is_copied_context")]
    assert not any("metrics" in step for step in copied)
    assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))


@pytest.mark.external
@given(records())
def test_the_models_of_the_format_take_every_document(record: dict[str, Any]) -> None:
    import atif  # pyright: ignore[reportMissingImports] - of make test-envs

    document = atif.Trajectory.model_validate_json(document_of(record))
    assert document.schema_version == "ATIF-v1.7"


STEPS: list[dict[str, Any]] = [
    {"step_id": 1, "source": "system", "message": "You add."},
    {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "2 + 2?"}]},
    {
        "step_id": 3,
        "timestamp": "2026-11-01T10:00:00Z",
        "source": "agent",
        "message": "",
        "reasoning_content": "I need the tool.",
        "tool_calls": [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2, "b": 2}}],
        "observation": {"results": [{"source_call_id": "c1", "content": "4"}]},
        "metrics": {"prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "logprobs": [-0.5, -1.0], "cost_usd": 0.1},
    },
    {
        "step_id": 4,
        "timestamp": "2026-11-01T10:00:05.5Z",
        "source": "agent",
        "message": "It is 4.",
        "metrics": {"prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6], "logprobs": [-0.25]},
        "observation": {"results": [{"content": "Task complete."}]},
    },
]
FOREIGN: dict[str, Any] = {
    "schema_version": "ATIF-v1.8",
    "session_id": "s-1",
    "agent": {"name": "terminus-2", "version": "2.0", "model_name": "some/model", "tool_definitions": [{"name": "add"}]},
    "steps": STEPS,
    "final_metrics": {"total_cost_usd": 0.25},
}


def read(document: dict[str, Any], where: Path = FILE) -> ReadEpisode:
    return read_atif(json.dumps(document).encode(), where)


def test_a_document_of_another_program_has_its_turns_tokens_and_closing_messages() -> None:
    found = read(FOREIGN)
    trajectory = stored_trajectory(msgspec.json.encode(found.record))
    assert (trajectory.episode_id, trajectory.task_id, trajectory.metrics) == ("s-1", "add-numbers", {"cost_usd": 0.25})
    assert [turn.output_ids.tolist() for turn in trajectory.turns] == [[3, 4], [6]]
    assert [turn.context_ids.tolist() for turn in trajectory.turns] == [[1, 2], [5]]
    assert trajectory.ended_s == 5.5
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    thought = {"reasoning_content": "I need the tool.", "tool_calls": [call]}
    assert trajectory.messages() == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]},
        {"role": "assistant", "content": None, **thought},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
    ]
    assert found.closing == {1: [{"role": "user", "content": "Task complete."}]}


def test_an_embedded_sub_agent_is_a_conversation_of_its_own_before_the_main_one() -> None:
    reference = {"results": [{"source_call_id": "c1", "subagent_trajectory_ref": [{"trajectory_id": "sub"}]}]}
    main = {**FOREIGN, "steps": [*STEPS[:2], {**STEPS[2], "observation": reference}, STEPS[3]]}
    sub = {**FOREIGN, "trajectory_id": "sub", "agent": {"name": "adder", "version": "1"}, "steps": STEPS}
    trajectory = stored_trajectory(msgspec.json.encode(read({**main, "subagent_trajectories": [sub]}).record))
    assert [(turn.role, turn.parent) for turn in trajectory.turns] == [("adder", None), ("adder", 0), ("", None), ("", 2)]
    assert trajectory.turns[3].messages[0]["content"] == "[sub-agent: sub]"


def test_steps_that_no_model_sampled_are_context() -> None:
    copied = {**STEPS[2], "is_copied_context": True}
    dispatched = {"step_id": 4, "source": "agent", "message": "go", "llm_call_count": 0}
    [turn] = read({**FOREIGN, "steps": [*STEPS[:2], copied, dispatched, STEPS[3]]}).record["turns"]
    assert [message["role"] for message in turn["messages"]] == ["system", "user", "assistant", "tool", "assistant"]


def test_tokens_without_log_probs_or_with_another_prompt_are_left_out() -> None:
    bare = {**STEPS[2], "metrics": {"completion_token_ids": [3, 4]}}
    rewritten = {**STEPS[3], "metrics": {"prompt_token_ids": [9], "completion_token_ids": [6], "logprobs": [0.5]}}
    turns = read({**FOREIGN, "steps": [*STEPS[:2], STEPS[2], rewritten]}).record["turns"]
    assert (turns[1]["context_ids"], turns[1]["output_ids"]) == ([], [])
    assert read({**FOREIGN, "steps": [*STEPS[:2], bare]}).record["turns"][0]["output_ids"] == []


def test_the_reward_that_harbor_wrote_is_the_final_reward(tmp_path: Path) -> None:
    trial = tmp_path / "add__x"
    (trial / "verifier").mkdir(parents=True)
    (trial / "agent").mkdir()
    (trial / "verifier" / "reward.txt").write_text("1.0\n")
    record = read(FOREIGN, trial / "agent" / "trajectory.json").record
    assert (record["final_reward"], record["success"], record["task_id"]) == (1.0, True, "add")
    (trial / "verifier" / "reward.txt").write_text("good")
    with pytest.raises(ConfigError, match=r"reward\.txt: expected a number"):
        read(FOREIGN, trial / "agent" / "trajectory.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": "ATIF-v2.0"}, "expected schema_version ATIF-v1.N, got 'ATIF-v2.0'"),
        ({"steps": [{"step_id": 1, "source": "robot", "message": ""}]}, r"is no ATIF document: .*\$\.steps\[0\]\.source"),
        ({"agent": None}, r"is no ATIF document: .*\$\.agent"),
    ],
)
def test_what_is_no_such_document_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read({**FOREIGN, **change})
