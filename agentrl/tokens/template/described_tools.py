"""A chat template without tools, to which they are described in the system message.

Before the template runs, schemas become text of the system message, calls become text of the assistant message, and results
become a user message, all in the form of one `ToolWriter`. Only the words of that form are scaffold; what stands between
them is content, in which `GuardedTemplate` has broken control tokens before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import TokenError
from agentrl.tokens.parse import CallWriter, ToolWriter
from agentrl.tokens.template.probing import QUESTION
from agentrl.tokens.template.rendering import ChatTemplate, PlainMessage, ToolSchemas
from agentrl.tokens.template.written_calls import calls_as_text, words_of

_RESULTS = frozenset({"tool", "function", "ipython"})
_MARK = "6180339887498948482045868343"


class DescribingTemplate(ChatTemplate):
    """The template of a model that was not trained with tools of its own."""

    def __init__(self, writer: ToolWriter, write: CallWriter, make: Mapping[str, Any]) -> None:
        """Compile the template of `make`, arguments of `ChatTemplate`; `writer` writes tools and results, `write` calls."""
        super().__init__(**make)
        self._writer, self._write = writer, write
        self.source = "\n".join([self.source, writer.description, words_of(write), *writer.result])
        self._has_system = self._shows_system()

    def render(self, messages: Sequence[PlainMessage], tools: ToolSchemas | None, *, generation_prompt: bool) -> str:
        """Return the text of a conversation, with tools, calls and results as text of its messages."""
        written = self._described(self._without_calls(messages), tools)
        return super().render(written, None, generation_prompt=generation_prompt)

    def _shows_system(self) -> bool:
        system: PlainMessage = {"role": "system", "content": _MARK}
        try:
            return _MARK in super().render([system, QUESTION], None, generation_prompt=True)
        except TokenError:
            return False

    def _described(self, messages: list[PlainMessage], tools: ToolSchemas | None) -> list[PlainMessage]:
        if not tools:
            return messages
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = self._writer.description.replace("{tools}", lines)
        place = ("system", "developer") if self._has_system else ("user",)
        if messages and messages[0]["role"] in place:
            first = messages[0]
            given = (first["content"], text) if self._has_system else (text, first["content"])
            return [{**first, "content": "\n\n".join(map(str, given))}, *messages[1:]]
        return [{"role": place[0], "content": text}, *messages]

    def _without_calls(self, messages: Sequence[PlainMessage]) -> list[PlainMessage]:
        written: list[PlainMessage] = []
        after_result = False
        for given in messages:
            role, message = given["role"], dict(given)
            if role in _RESULTS:
                message = _from_user(str(given["content"]).join(self._writer.result))
            if after_result and message["role"] == "user":
                message = _from_user(f"{written.pop()['content']}\n{message['content']}")
            after_result = role in _RESULTS
            written.append(calls_as_text(message, self._write))
        return written


def _from_user(text: str) -> PlainMessage:
    return {"role": "user", "content": text}
