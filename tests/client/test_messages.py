"""Whatever form history comes back in, the graph sees plain messages with the same meaning."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionUserMessageParam,
)

from agentrl.client.arguments import checked_messages
from agentrl.errors import WorkflowError

CALL = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 1}'}}


def test_mappings_pass_unchanged_and_uncopied():
    message: ChatCompletionUserMessageParam = {"role": "user", "content": "hi"}
    assert checked_messages([message])[0] is message


def test_openai_objects_pass_as_they_are():
    message = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [CALL]})
    assert checked_messages([message])[0] is message


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty"),
        ("hi", "a list of messages"),
        (3, "a list of messages, got int 3"),
        (None, "a list of messages, got NoneType"),
        ({"role": "user", "content": "hi"}, "a list of messages"),
    ],
)
def test_what_is_no_list_of_messages_is_refused(messages: Any, says: str):  # noqa: ANN401
    with pytest.raises(WorkflowError, match=says):
        checked_messages(messages)
