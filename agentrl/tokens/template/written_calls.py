"""A chat template that shows tools and leaves out calls, for which calls become text of the assistant message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentrl.tokens.parse import CallWriter
from agentrl.tokens.template.rendering import ChatTemplate, PlainMessage, ToolSchemas


class WritingTemplate(ChatTemplate):
    """The template of a model that is asked for calls, and whose earlier calls the template does not write."""

    def __init__(self, write: CallWriter, make: Mapping[str, Any]) -> None:
        """Compile the template of `make`, arguments of `ChatTemplate`; `write` writes the calls."""
        super().__init__(**make)
        self._write = write
        self.source = f"{self.source}\n{words_of(write)}"

    def render(self, messages: Sequence[PlainMessage], tools: ToolSchemas | None, *, generation_prompt: bool) -> str:
        """Return the text of a conversation, with calls as text of its messages."""
        written = [calls_as_text(message, self._write) for message in messages]
        return super().render(written, tools, generation_prompt=generation_prompt)


def calls_as_text(message: PlainMessage, write: CallWriter) -> PlainMessage:
    """Return a message with its calls, if there are any, at the end of its content."""
    if not message.get("tool_calls"):
        return message
    functions = [cast("PlainMessage", call["function"]) for call in cast("list[PlainMessage]", message["tool_calls"])]
    calls = write([(str(each["name"]), cast("Mapping[str, object]", each["arguments"])) for each in functions])
    text = f"{message['content']}\n{calls}" if message.get("content") else calls
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def words_of(write: CallWriter) -> str:
    """Return a call, which holds the words that stand around the content of calls."""
    return write([("f", {"x": 1})])
