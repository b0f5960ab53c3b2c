"""Calls that stand in text: what a client writes again is the recorded answer, and what it edits is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tokens.verify import verify
from agentrl.types import StopReason
from agentrl_doors.gateway.sessions.resent_changes import Change
from agentrl_doors.gateway.sessions.text_calls import is_same_text
from tests.support.doors import HI, door_client, scripted_client
from tests.support.histories import history_of, json_values, spellings


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def call(arguments: object, name: str = "calc") -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def assistant(text: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SAME: list[tuple[str, str, set[str]]] = [
    ('Ad.\n<tool_call>{"name":"calc","arguments":{"b": 3.0, "a": 2}}</tool_call>', f"Ad.\n{call({'a': 2, 'b': 3})}", set()),
    (call('{"a": 1}') + call('{"a": 2}'), call({"a": 1}) + "\n" + call({"a": 2}), set()),
    (f"{call({'a': 1})} and {call({'a': 2})} I wait.", call({"a": 1}) + "\n" + call({"a": 2}), {"text"}),
    (f"I add. {call({'a': 1})}", call({"a": 1}), {"text"}),
    ('<tool_call>\n{"name": "calc", "arguments": {"a": 1}}', call({"a": 1}), set()),
    (call('{"a": 1,}'), call({"a": 1}), {"broken"}),
    (call("{'a': 1}"), call('"{\'a\': 1}"'), {"broken"}),
    (call({"a": "1"}), call({"a": 1}), {"coerced"}),
    (call({"a": 1, "b": None}), call({"a": 1}), {"dropped"}),
    ('[TOOL_CALLS] [{"name":"calc","arguments":{"a":1}}]', '[TOOL_CALLS][{"name": "calc", "arguments": {"a": 1}}]', set()),
    ('{"name":"calc","parameters":{"a":1}}', '{"name": "calc", "parameters": {"a": 1}}', set()),
    ('Action: calc\nAction Input: {"b":2,"a":1}', 'Action: calc\nAction Input: {"a": 1, "b": 2}', set()),
    ('Use it:\n```json\n{"action":"calc","a":1}\n```', 'Use it:\n```json\n{\n  "action": "calc",\n  "a": 1\n}\n```', set()),
]  # fmt: skip
OTHER: list[tuple[str, str]] = [
    ("Five.", "Six."),
    (f"I add. {call({'a': 1})}", f"I subtract. {call({'a': 1})}"),
    (call({"a": 1}), call({"a": 2})),
    (call({"a": 1}), call({"a": 1}, "other")),
    (call({"a": 1}), call('{"a": 1,}')),
    (call({"a": 1}), call({"a": 1}) + call({"a": 1})),
    (call({"a": 1}), f"{call({'a': 1})} I wait."),
    ('The answer: {"x": "1"}', 'The answer: {"x": 1}'),
    ('The answer: {"x": 1}', '{"x": 1}'),
    ("{" * 5000, "{" * 5000 + " "),
    ('{"a":' * 5000, '{"a": ' * 5000),
]


@pytest.mark.parametrize(("recorded", "shown", "changes"), SAME)
def test_calls_that_a_client_writes_again_as_text_are_the_recorded_answer(recorded: str, shown: str, changes: set[str]):
    message = assistant(recorded)
    history, metrics = history_of(message)
    restored = history.restored([*HI, assistant(shown), *HI])
    assert restored[1] is message
    assert {name.removeprefix("resent.") for name in metrics} == changes | {"respelled"}


@pytest.mark.parametrize(("recorded", "shown"), OTHER)
def test_an_edited_text_is_left_as_it_is_sent(recorded: str, shown: str):
    history, metrics = history_of(assistant(recorded))
    sent = assistant(shown)
    assert history.restored([*HI, sent, *HI])[1] is sent
    assert not metrics


@settings(max_examples=40)
@given(
    st.data(),
    st.dictionaries(st.text(max_size=12), json_values, max_size=4),
    st.dictionaries(st.text(max_size=5), json_values),
)
def test_another_spelling_of_a_call_in_text_is_the_same_and_other_arguments_are_not(
    data: st.DataObject, arguments: dict[str, Any], others: dict[str, Any]
):
    recorded = f"I add.\n{call(arguments)}"
    found: set[Change] = set()
    assert is_same_text(recorded, f"I add. {call(data.draw(spellings(arguments)))}", found)
    assert found == {Change.RESPELLED}
    assert not is_same_text(recorded, f"I add. {call({**others, 'a new one': 1})}", set())


@pytest.mark.parametrize("is_recorded_as_text", [True, False])
def test_a_call_is_the_same_in_a_field_and_in_text(is_recorded_as_text: bool):
    function = {"name": "calc", "arguments": '{"a":1}'}
    fields = assistant("I add.", tool_calls=[{"id": "c1", "type": "function", "function": function}])
    text = assistant(f"I add.\n{call({'a': 1})}")
    recorded, shown = (text, fields) if is_recorded_as_text else (fields, text)
    history, metrics = history_of(recorded)
    assert history.restored([*HI, shown, *HI])[1] is recorded
    assert metrics == {"resent.respelled": 1.0}
    edited = assistant(f"I add.\n{call({'a': 2})}")
    history, metrics = history_of(fields)
    assert history.restored([*HI, edited, *HI])[1] is edited


async def test_an_agent_with_its_tools_in_the_prompt_is_one_branch():
    sampled = 'I add.\n<tool_call>\n{"arguments": {"b" :  3.0, "a": 2}, "name": "calc"}\n</tool_call>'
    client, _ = scripted_client([sampled, sampled, "Five."])
    history: list[Any] = [{"role": "system", "content": "Call a tool in <tool_call></tool_call> tags."}, *HI]
    async with client.served() as door, door_client(door) as remote:
        for _ in range(3):
            said = (await remote.chat.completions.create(model="policy", messages=history)).choices[0].message
            assert not said.tool_calls
            shown = f"I add.\n{call({'b': 3.0, 'a': 2})}" if "<tool_call>" in (said.content or "") else said.content
            given = {"role": "user", "content": "<tool_response>\n5\n</tool_response>"}
            history += [assistant(shown), given]
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    verify(trajectory)
    assert len(trajectory.branches()) == 1
    assert [turn.fork for turn in trajectory.turns] == [None] * 3
    assert trajectory.metrics["resent.respelled"] == 2.0
