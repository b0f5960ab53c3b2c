"""Histories as clients send them back: what they rewrite is the recorded answer, and what they edit is not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.types import Message, StopReason
from agentrl_doors.gateway.sessions.matching import ResentHistory
from agentrl_doors.gateway.sessions.resent_changes import Change
from tests.support.doors import CALC, HI, scripted_client
from tests.support.histories import history_of, json_values, short_texts, spellings

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "all": {"type": "boolean", "default": False},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean", "default": True}}},
    },
}
TOOLS: Any = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]


def answer(
    arguments: object, *, text: str = "", reasoning: str = "", call_id: str = "call0", name: str = "write"
) -> Message:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    calls = [{"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}]
    fields: Message = {"role": "assistant", "content": text, "tool_calls": calls}
    return {**fields, "reasoning_content": reasoning} if reasoning else fields


def result(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": "done"}


def sent_back(recorded: Message, shown: Message) -> tuple[bool, set[str]]:
    """Return whether the shown message is taken for the recorded one, and the changes that were counted."""
    history, metrics = history_of(recorded)
    restored = history.restored([*HI, shown, result(shown["tool_calls"][0]["id"])], TOOLS)
    assert restored[0] == HI[0]
    return restored[1] is recorded, {name.removeprefix("resent.") for name in metrics}


@settings(max_examples=40)
@given(st.data(), st.dictionaries(short_texts, json_values, max_size=4))
def test_another_spelling_of_the_same_arguments_is_the_recorded_answer(data: st.DataObject, arguments: dict[str, Any]):
    shown = answer(data.draw(spellings(arguments)))
    assert sent_back(answer(arguments), shown) == (True, set())


@settings(max_examples=40)
@given(
    content=st.sampled_from([None, "", [], [{"type": "text", "text": ""}]]),
    extra=st.dictionaries(st.sampled_from(["annotations", "refusal", "provider_specific_fields"]), st.none(), max_size=3),
    absent=st.booleans(),
)
def test_content_that_is_null_empty_or_absent_beside_calls_is_the_same(content: object, extra: dict[str, Any], absent: bool):
    shown: Message = {**answer({"path": "a"}), "content": content, **extra}
    if absent:
        del shown["content"]
    assert sent_back(answer({"path": "a"}), shown) == (True, set())
    assert sent_back(answer({"path": "a"}, text="I write."), shown) == (True, {"text"})


@settings(max_examples=40)
@given(arguments=st.fixed_dictionaries({"path": short_texts, "count": st.integers(0, 99)}))
def test_what_a_schema_adds_drops_and_converts_is_counted_and_the_same(arguments: dict[str, Any]):
    recorded = {**arguments, "left": None, "options": {}}
    shown = {**arguments, "all": False, "count": str(arguments["count"]), "options": {"deep": True}}
    assert sent_back(answer(recorded), answer(shown)) == (True, {"defaults", "dropped", "coerced"})


@pytest.mark.parametrize(
    ("recorded", "shown", "changes"),
    [
        ({"text": "b  \nx\t\n"}, {"text": "b\nx"}, {"blanks"}),
        ({"count": 10**400}, {"count": None}, {"overflow"}),
        ({"count": "1"}, {"count": 1}, {"coerced"}),
        ({"all": "True"}, {"all": True}, {"coerced"}),
        ({"count": 12345678901234567890}, {"count": 12345678901234567000}, {"coerced"}),
        ({"options": '{"deep": false}'}, {"options": {"deep": False}}, {"coerced"}),
        ({}, "", set()),
        ("{broken", {}, {"broken"}),
        ("{broken", {"__unparsedToolInput": {"raw": "{broken", "len": 7}}, {"broken"}),
        ('{"path": "a', {"path": "a"}, {"broken"}),
        ("{broken", "{broken", set()),
    ],
)
def test_a_named_change_of_arguments_is_counted_and_the_same(recorded: object, shown: object, changes: set[str]):
    assert sent_back(answer(recorded), answer(shown)) == (True, changes)


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ({"path": "a"}, {"path": "b"}),
        ({"path": "a"}, {"path": "a", "all": True}),
        ({"path": "a"}, {"path": "a", "text": "added"}),
        ({"path": "a"}, {}),
        ({"count": 1}, {"count": 2}),
        ({"count": 1}, {"count": None}),
        ({"all": True}, {"all": 2}),
        ({"options": {"deep": False}}, {"options": {}, "all": False, "path": None, "count": 0}),
        ({"text": " b"}, {"text": "b"}),
    ],
)
def test_any_other_change_of_arguments_is_an_edit(recorded: object, shown: object):
    assert sent_back(answer(recorded), answer(shown)) == (False, set())


def test_a_call_that_a_client_renamed_is_found_by_its_id_alone():
    shown = answer({"tool": "write", "error": "no such tool"}, name="invalid")
    assert sent_back(answer({"path": "a"}), shown) == (True, {"renamed"})
    assert sent_back(answer({"path": "a"}), {**shown, "tool_calls": [{**shown["tool_calls"][0], "id": "x"}]})[0] is False
    assert sent_back(answer({"path": "a"}), answer({"path": "a"}, name="read")) == (False, set())


def test_ids_that_a_client_changed_are_the_sampled_ones_again_in_calls_and_results():
    recorded = answer({"path": "a", "left": None})
    history, metrics = history_of(answer({"path": "other"}, call_id="x"), recorded)
    restored = history.restored([*HI, answer({"path": "a", "all": False}, call_id="mine"), result("mine")], TOOLS)
    assert restored[1:] == [recorded, result("call0")]
    assert metrics == {"resent.ids": 1.0, "resent.defaults": 1.0, "resent.dropped": 1.0}


def test_reasoning_that_a_client_drops_is_the_same_and_other_reasoning_is_counted():
    recorded = answer({"path": "a"}, reasoning="I think.")
    assert sent_back(recorded, answer({"path": "a"})) == (True, set())
    assert sent_back(recorded, answer({"path": "a"}, reasoning=" I think.\n")) == (True, set())
    assert sent_back(recorded, answer({"path": "a"}, reasoning="In short.")) == (True, {"reasoning"})
    moved = {**answer({"path": "a"}), "content": "<think>\nI think.\n</think>\n\n"}
    assert sent_back(recorded, moved) == (True, set())


def test_a_text_with_edited_words_is_left_as_it_is_sent():
    history, metrics = history_of({"role": "assistant", "content": "It is 5."})
    shown: Message = {"role": "assistant", "content": "It is 6."}
    assert history.restored([*HI, shown])[1] is shown
    assert not metrics


def test_a_change_counts_once_however_often_the_history_comes_back():
    history, metrics = history_of(answer({"path": "a"}))
    for _ in range(3):
        history.restored([*HI, answer({"path": "a", "all": False})], TOOLS)
    assert metrics == {"resent.defaults": 1.0}


async def test_a_conversation_whose_answers_are_rewritten_each_turn_is_one_branch():
    calling = 'I write.\n<tool_call>\n{"name": "calc", "arguments": {"b": 3.0, "a": "2"}}\n</tool_call>'
    client, _ = scripted_client([calling, calling, "done"])
    history: list[Any] = list(HI)
    resent = ResentHistory(client.episode.turns, client.episode.metrics)
    for index in range(3):
        completion = await client.chat.completions.create(messages=resent.restored(history, [CALC]), tools=[CALC])
        message = completion.choices[0].message
        for call in message.tool_calls or ():
            function = {"name": "calc", "arguments": '{"a":2,"b":3,"exact":false}'}
            shown = {"id": f"mine{index}", "type": "function", "function": function}
            history += [{"role": "assistant", "content": None, "tool_calls": [shown]}, result(f"mine{index}")]
            assert call.id != shown["id"]
    trajectory = client.close(StopReason.COMPLETED, 1.0)
    assert len(trajectory.branches()) == 1
    assert all(turn.fork is None for turn in trajectory.turns)
    assert trajectory.metrics["resent." + Change.COERCED] == 2.0
