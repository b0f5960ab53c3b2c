"""Reading remembered messages gives what reading them for the first time gives, even if messages change in place."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel, ConfigDict

from agentrl.errors import TokenError
from agentrl.tokens.history import MessageReader, ReadRequest
from tests.tokens.dialogues import assistant, calls, result, user

WORDS = st.sampled_from(("a", "b", " a ", "", "<think>\nx\n</think>\n\na", "é"))
KINDS = ("user", "answer", "parts", "call", "object", "object call", "thoughts", "checked", "loose", "alike")
ARGUMENTS = st.sampled_from(('{"a": 1}', '{"a":1.0}', '{"a": true}', "{", {"a": 1}, {"a": True}, {"a": 1.0}, None))


class Checked(BaseModel):
    """A message of a user's own class, which replaces its dict on assignment."""

    model_config = ConfigDict(validate_assignment=True, extra="allow")
    role: str
    content: str


class Loose(BaseModel):
    """A message of a user's own class, which keeps its content beside its fields."""

    model_config = ConfigDict(extra="allow")
    role: str


class Alike(BaseModel):
    """A message of a user's own class, equal to any of the same role."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike) and other.role == self.role

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def message_of(data: st.DataObject) -> Any:  # noqa: ANN401
    kind = data.draw(st.sampled_from(KINDS))
    word = data.draw(WORDS)
    match kind:
        case "user":
            return user(word)
        case "answer":
            return assistant(word, **({"reasoning_content": "r"} if data.draw(st.booleans()) else {}))
        case "parts":
            return {"role": "user", "content": [{"type": "text", "text": word}, {"type": "text", "text": "z"}]}
        case "call":
            message = calls("{}")
            message["tool_calls"][0]["function"]["arguments"] = copy.deepcopy(data.draw(ARGUMENTS))
            return message
        case "object":
            return ChatCompletionMessage.model_validate(assistant(word))
        case "object call":
            return ChatCompletionMessage.model_validate(calls('{"a": 1}', '{"b": 2}'))
        case "thoughts":
            return ChatCompletionMessage.model_validate(assistant(word, reasoning_content=data.draw(WORDS)))
        case "checked":
            return Checked(role="user", content=word)
        case "alike":
            return Alike(role="user", content=word)
        case _:
            return Loose.model_validate({"role": "user", "content": word})


def change(message: Any, data: st.DataObject) -> None:  # noqa: ANN401
    """Change a message in place, at some depth."""
    word = data.draw(WORDS)
    fields: Any = message if isinstance(message, dict) else None
    tool_calls = message.get("tool_calls") if fields is not None else getattr(message, "tool_calls", None)
    if tool_calls:
        call = tool_calls[data.draw(st.integers(0, len(tool_calls) - 1))]
        match data.draw(st.sampled_from(("arguments", "name", "function", "list", "drop"))):
            case "arguments":
                arguments = data.draw(ARGUMENTS)
                if isinstance(call, dict):
                    call["function"]["arguments"] = copy.deepcopy(arguments)
                else:
                    call.function.arguments = arguments if isinstance(arguments, str) else "{}"
            case "name":
                if isinstance(call, dict):
                    call["function"]["name"] = "f" + word
                else:
                    call.function.name = "f" + word
            case "function":
                if isinstance(call, dict):
                    call["function"] = {"name": "g" + word, "arguments": "{}"}
                else:
                    call.function = call.function.model_copy(update={"name": "g" + word})
            case "list":
                tool_calls.append(copy.deepcopy(call))
            case _:
                tool_calls.pop()
    elif fields is None:
        name = data.draw(st.sampled_from(("content", "reasoning_content")))
        setattr(message, name, word)
    elif isinstance(fields["content"], list):
        if data.draw(st.booleans()):
            fields["content"][0]["text"] = word
        else:
            fields["content"].append({"type": "text", "text": word})
    else:
        match data.draw(st.sampled_from(("content", "name", "role", "rename", "reasoning"))):
            case "content":
                fields["content"] = word
            case "name":
                fields["name"] = "n" + word
            case "role":
                fields["role"] = "user" if fields["role"] == "assistant" else "assistant"
            case "rename":
                fields["text"] = fields["content"]
                fields["content"] = None
            case _:
                fields["reasoning_content"] = word


def read(reader: MessageReader, messages: list[Any]) -> ReadRequest | str:
    try:
        return reader.read(messages)
    except TokenError as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_remembered_conversation_reads_like_a_new_one(data: st.DataObject):
    reader = MessageReader()
    conversations: list[list[Any]] = [[]]
    for _ in range(data.draw(st.integers(1, 10))):
        at = data.draw(st.integers(0, len(conversations) - 1))
        messages = conversations[at]
        match data.draw(st.sampled_from(("grow", "grow", "grow", "change", "drop", "branch", "new", "respell", "replace"))):
            case "grow":
                messages += [message_of(data) for _ in range(data.draw(st.integers(1, 3)))]
            case "change" if messages:
                change(messages[data.draw(st.integers(0, len(messages) - 1))], data)
            case "drop" if messages:
                del messages[data.draw(st.integers(0, len(messages) - 1))]
            case "branch":
                conversations.append([*messages, message_of(data)])
            case "new":
                conversations.append([message_of(data)])
            case "respell":
                conversations[at] = copy.deepcopy(messages)
            case "replace" if messages:
                messages[data.draw(st.integers(0, len(messages) - 1))] = message_of(data)
            case _:
                pass
        assert read(reader, conversations[at]) == read(MessageReader(), conversations[at])


def test_values_that_move_to_another_message_are_noticed():
    reader = MessageReader()
    first: dict[str, Any] = {"role": "user", "content": "a", "name": "n"}
    second: dict[str, Any] = {"role": "user", "content": "b"}
    before = reader.read([first, second])
    first.pop("name")
    moved = {"name": "n", **second}
    second.clear()
    second.update(moved)
    after = reader.read([first, second])
    assert after.prefixes != before.prefixes
    assert after.prefixes == MessageReader().read([first, second]).prefixes


@pytest.mark.parametrize("kind", [Loose, Alike])
def test_another_object_of_a_class_of_ones_own_is_another_message(kind: type[BaseModel]):
    reader = MessageReader()
    first: Any = [kind.model_validate(user("a"))]
    reader.read(first)
    edited: Any = [kind.model_validate(user("b"))]
    assert reader.read(edited).prefixes == MessageReader().read(edited).prefixes


def test_what_calls_everything_its_equal_passes_for_no_message():
    class Anything(dict[str, Any]):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # pyright: ignore[reportAssignmentType]

    reader = MessageReader()
    known: Any = [user("a"), ChatCompletionMessage.model_validate(assistant("b"))]
    reader.read(known)
    for at in range(2):
        edited: Any = [user("a"), assistant("b")]
        edited[at] = Anything(role="user", content="c")
        assert reader.read(edited).prefixes == MessageReader().read(edited).prefixes


def test_what_an_object_is_given_later_beside_its_fields_is_noticed():
    message: Any = ChatCompletionMessage.model_validate(assistant("a"))
    reader = MessageReader()
    assert reader.read([message]).reasoning == {}
    message.reasoning_content = "r"
    assert reader.read([message]).reasoning == {0: "r"}


def test_an_object_whose_fields_are_replaced_as_a_whole_is_noticed():
    message: Any = ChatCompletionMessage.model_validate(assistant("a"))
    reader = MessageReader()
    before = reader.read([message]).prefixes
    message.__dict__ = {**message.__dict__, "content": "b"}
    assert reader.read([message]).prefixes == MessageReader().read([message]).prefixes != before


def test_tool_calls_that_a_class_of_ones_own_keeps_beside_its_fields_are_watched():
    message: Any = Loose.model_validate({"role": "assistant", "content": "", "tool_calls": calls("{}")["tool_calls"]})
    reader = MessageReader()
    before = reader.read([message])
    message.tool_calls[0]["function"]["arguments"] = '{"a": 2}'
    after = reader.read([message])
    assert after.prefixes != before.prefixes
    assert after.prefixes == MessageReader().read([message]).prefixes


def test_a_conversation_of_new_objects_is_known_too():
    parts = {"role": "user", "content": [{"type": "text", "text": "y"}]}
    messages: list[Any] = [user("x?"), calls('{"a": 1}'), result(0, "3"), parts]
    reader = MessageReader()
    reader.read(messages)
    [known] = reader._conversations  # pyright: ignore[reportPrivateUsage]
    assert known.begins(json.loads(json.dumps(messages)))
    assert known.begins(copy.deepcopy(messages))


def test_unmatched_history_does_not_grow_the_memory():
    reader = MessageReader()
    for at in range(50):
        reader.read([user(str(at)), user("x")])
    assert len(reader._conversations) <= 4  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (5, r"tool_calls: expected a list of calls, got int 5"),
        ({"id": "c"}, "expected a list of calls, got dict"),
        ((call for call in ()), "expected a list of calls, got generator"),
        ([5], "expected a function with a name, got 5"),
        ([{"function": {"name": "f", "arguments": {"a": {1, 2}}}}], "expected JSON arguments"),
    ],
)
def test_tool_calls_that_are_none_are_refused_by_name(given: object, says: str):
    with pytest.raises(TokenError, match=says):
        MessageReader().read([user("a"), {"role": "assistant", "content": "", "tool_calls": given}])


def test_developer_and_system_mean_the_same():
    developer, system = ({"role": role, "content": "be brief"} for role in ("developer", "system"))
    assert MessageReader().read([developer]).prefixes == MessageReader().read([system]).prefixes
