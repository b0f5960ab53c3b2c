"""Finds the form of a template's tool calls: made-up calls are rendered by the template, read, and compared.

Invariant: a form that is found returns made-up calls with equal names and arguments, and its limits leave out what the
template refuses or drops.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from agentrl.errors import TokenError
from agentrl.tokens.breaks import restored
from agentrl.tokens.parse import THINK_CLOSE, THINK_OPEN, CallLimits, ToolFormat, parse_text
from agentrl.tokens.template.probing import QUESTION, CallStyle
from agentrl.tokens.template.rendering import GuardedTemplate, PlainMessage, Rendered, ToolSchemas

_TEXT = "Let me see."
_THOUGHT = "a tool helps"
_MARK = "2236067977499789696409173668"
_MARKED: PlainMessage = {"role": "user", "content": _MARK}
_ARGUMENTS: dict[str, object] = {
    "text": '\tHe said "hi"\\n & \'no\':\n\n{"name": 1} [ü, 中, 🙂] <b></tool_call></parameter> \\',
    "word": "",
    "count": -12,
    "ratio": 0.5,
    "flag": True,
    "missing": None,
    "many": [1, "two", [], {"a": False}, None],
    "table": {"key 1": {"deep": ["x\ny", 2.25]}, "": []},
}
_TYPES: dict[str, object] = {
    "text": "string", "word": "string", "count": "integer", "ratio": "number", "flag": "boolean",
    "missing": "integer", "many": "array", "table": "object",
}  # fmt: skip
_TOOLS: ToolSchemas = [
    {
        "type": "function",
        "function": {
            "name": "try_out",
            "description": "Tries a value of each type.",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": kind, "description": "a value"} for name, kind in _TYPES.items()},
                "required": ["text"],
            },
        },
    }
]
_Calls = Sequence[dict[str, object]]
_EMPTY: _Calls = ({},)


class _Made(NamedTuple):
    """Made-up messages with one call, and one with two."""

    one: Sequence[_Calls]
    two: _Calls


_HARD = _Made([({**_ARGUMENTS},), _EMPTY], ({**_ARGUMENTS}, {"text": "b"}))
_PLAIN = [
    _Made([({"text": "two words", "count": 3},), _EMPTY], ({"text": "two words"}, {"text": "b"})),
    _Made([({"text": "two words"},), _EMPTY], ({"text": "two words"}, {"text": "b"})),
    _Made([({"count": 3},), _EMPTY], ({"count": 3}, {"count": 4})),
]
"""For templates that write some values wrongly, such as texts without quotes: what comes back from them still."""


class FoundFormat(NamedTuple):
    """The form of a template's calls."""

    form: ToolFormat
    limits: CallLimits
    style: CallStyle


def answer_text(
    template: GuardedTemplate, message: PlainMessage, tools: ToolSchemas | None, ends: Sequence[str]
) -> Rendered:
    """Return the text that a model samples for an assistant message, up to its end-of-turn text, one of `ends`.

    Raises:
        TokenError: the template refuses the message, or does not write it after its own generation prompt.
    """
    asked, (whole, nonce) = _asked_and_answered(template, QUESTION, message, tools)
    prompt = asked.text
    if not whole.startswith(prompt):  # a template that writes the tools, or the system message, at the last question
        asked, (told, told_nonce) = _asked_and_answered(template, _MARKED, message, tools)
        opening, after = asked.text.rpartition(_MARK)[2], told.partition(_MARK)[2]
        if opening and after.startswith(opening):
            return Rendered(_cut(after[len(opening) :], ends), told_nonce)
    opened, _, _ = prompt.rpartition(THINK_OPEN)
    if whole.startswith(prompt):
        text = whole[len(prompt) :]
    elif prompt.rstrip().endswith(THINK_OPEN) and whole.startswith(opened):
        text = whole[len(opened) :].removeprefix(THINK_OPEN)
        if not text.lstrip().startswith(THINK_CLOSE):  # the template drops the reasoning of earlier answers
            text = f"{message.get('reasoning_content', '')}\n{THINK_CLOSE}\n\n{text}"
    else:
        raise TokenError(
            "the chat template does not write an assistant message after its own generation prompt; "
            f"expected {prompt[-40:]!r} before it"
        )
    return Rendered(_cut(text, ends), nonce)


def _asked_and_answered(
    template: GuardedTemplate, question: PlainMessage, answer: PlainMessage, tools: ToolSchemas | None
) -> tuple[Rendered, Rendered]:
    return (
        template.render([question], tools or None, generation_prompt=True),
        template.render([question, answer], tools or None, generation_prompt=False),
    )


class RoundTrip:
    """Tries forms on one template."""

    def __init__(self, template: GuardedTemplate, ends: Sequence[str]) -> None:
        """Take the template and the texts that end an assistant message."""
        self._template, self._ends = template, ends
        prompt = template.render([QUESTION], _TOOLS, generation_prompt=True)
        self.prompt: str = prompt.text
        """What the template writes before an answer to a question with tools."""
        self._thinking_open = prompt.opens_thinking

    def find(self, forms: Iterable[ToolFormat], text_arguments: bool) -> FoundFormat | None:
        """Return the first form in which the calls come back; None if there is none.

        Where no form reads every value, as from templates that write texts without quotes, plain ones must come back.

        `text_arguments` says how the template is known to take arguments; if that fails, the other way is tried.
        """
        styles = [CallStyle(as_text, no_text) for as_text in (text_arguments, not text_arguments) for no_text in (None, "")]
        tried = [form for form in forms if form.told in self.prompt]
        for made in (_HARD, *_PLAIN):
            for style in styles:
                for form in tried:
                    if all(self._comes_back(form, calls, style) for calls in made.one):
                        return FoundFormat(form, self._limits(form, style, made), style)
        return None

    def leaves_out_calls(self) -> bool:
        """Return whether the template writes nothing of a call, or breaks on one."""
        for style in (CallStyle(), CallStyle(no_text="")):
            message = _call_message(None, ({"text": _MARK},), style)
            try:
                if _MARK in self._template.render([QUESTION, message], _TOOLS, generation_prompt=False).text:
                    return False
            except TokenError:
                continue
        return True

    def sample(self, text_arguments: bool) -> str:
        """Return how the template writes a call, or why it does not; for a message."""
        written = ""
        for no_text in (None, ""):
            try:
                message = _call_message(None, ({"text": "x"},), CallStyle(text_arguments, no_text))
                return repr(self._written(message)[-200:])
            except TokenError as error:
                written = f"nothing ({error})"
        return written

    def _limits(self, form: ToolFormat, style: CallStyle, made: _Made) -> CallLimits:
        text, thought = {"content": _TEXT}, {"reasoning_content": _THOUGHT, "thinking": _THOUGHT}
        return CallLimits(
            max_calls=None if self._comes_back(form, made.two, style) else 1,
            with_text=self._comes_back(form, made.one[0], style, **text),
            with_reasoning_and_text=self._comes_back(form, made.one[0], style, **text, **thought),
        )

    def _comes_back(self, form: ToolFormat, calls: _Calls, style: CallStyle, **more: str) -> bool:
        try:
            text = self._written({**_call_message(form, calls, style), **more})
        except TokenError:
            return False
        parsed = parse_text(text, form=form, tools=_TOOLS, thinking_open=self._thinking_open, salt="")
        found = [(call.name, _sorted_json(json.loads(call.arguments))) for call in parsed.tool_calls]
        if found != [("try_out", _sorted_json(arguments)) for arguments in calls]:
            return False
        return bool(more) or (not parsed.content.strip() and not parsed.malformed)

    def _after_prompt(self, whole: str) -> str:
        """Return the end of a rendering that does not begin with the generation prompt, from where the two differ."""
        both = zip(self.prompt, whole, strict=False)
        at = next((at for at, (a, b) in enumerate(both) if a != b), min(len(self.prompt), len(whole)))
        at = min(at, whole.rfind("<", 0, at)) if whole.rfind("<", 0, at) > whole.rfind(">", 0, at) else at
        text = whole[at:]
        closed = self.prompt.rstrip().endswith(THINK_CLOSE)
        return text.partition(THINK_CLOSE)[2] if closed and THINK_CLOSE in text else text

    def _written(self, message: PlainMessage) -> str:
        """Return what the template writes for a message after its generation prompt, without the end of the turn."""
        try:
            text, nonce = answer_text(self._template, message, _TOOLS, self._ends)
        except TokenError:
            whole, nonce = self._template.render([QUESTION, message], _TOOLS, generation_prompt=False)
            text = _cut(self._after_prompt(whole), self._ends)
        for end in self._ends:
            text = text.removesuffix(end)
        return restored(text, nonce) if nonce else text


def _cut(text: str, ends: Sequence[str]) -> str:
    """Return a text up to its last end; where a template writes two in a row, up to the first of them."""
    found = [at + len(end) for end in ends if (at := text.rfind(end)) >= 0]
    text = text[: max(found)] if found else text
    while True:
        last = next((end for end in ends if text.endswith(end)), "")
        before = text.removesuffix(last).rstrip()
        if not last or not before.endswith(tuple(ends)):
            return text
        text = before


def _call_message(form: ToolFormat | None, calls: _Calls, style: CallStyle) -> PlainMessage:
    make_id = form.call_id if form is not None else None
    written: list[dict[str, object]] = []
    for at, arguments in enumerate(calls):
        value = json.dumps(arguments, ensure_ascii=False) if style.text_arguments else arguments
        call_id = make_id("try_out", at) if make_id else f"call0000{at}"
        written.append({"type": "function", "id": call_id, "function": {"name": "try_out", "arguments": value}})
    return {"role": "assistant", "content": style.no_text, "tool_calls": written}


def _sorted_json(value: object) -> str:
    return json.dumps(value, sort_keys=True)
