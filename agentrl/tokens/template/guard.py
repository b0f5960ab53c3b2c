"""Keeps text of a conversation from posing as a control token on its way through a chat template.

Before a template runs, every control token text inside content (user text, tool output, names, arguments, schemas) is
broken by a *nonce*: digits that no text holds by chance and that no template touches. After it has run, the control
tokens still whole are the template's own. The nonce goes away when the text is encoded, so the words stay as they were.

Templates that cut and join strings could mend a broken token or build one out of harmless pieces. For those, content in
which a control token could begin is replaced by digits and the template runs once more: it must write the same control
tokens in the same order, or the conversation is refused.

Invariant: in the text `GuardedTemplate.render` returns, a control token text stands only where the template put one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import jinja2
import jinja2.nodes

from agentrl.errors import TokenError
from agentrl.tokens.parse import THINK_OPEN
from agentrl.tokens.template.environment import ChatTemplate, PlainMessage

Tools = Sequence[Mapping[str, object]] | None
_Change = Callable[[str, bool], str]
"""Takes a text and whether it is a word of the message format itself."""

_SAFE_FILTERS = frozenset({"tojson", "trim", "length", "count", "string", "safe", "items", "default", "d", "e", "escape"})
_SAFE_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "items", "keys", "values", "get"})
_TRUSTED_KEYS = frozenset({"role", "type"})
"""Templates compare the values of these keys with words of their own."""
_STRUCTURE = frozenset((
    "role", "content", "name", "type", "function", "tool_calls", "tool_call_id", "id", "arguments", "reasoning_content",
    "thinking", "description", "parameters", "properties", "required", "enum", "items", "default", "title", "anyOf", "oneOf",
    "allOf", "additionalProperties", "return", "strict", "format",
))  # fmt: skip
"""Keys of messages and schemas that templates look up by name."""


class Rendered(NamedTuple):
    """Text a template wrote, in which control tokens inside content are broken by `nonce`."""

    text: str
    nonce: str
    """Empty if nothing had to be broken."""

    @property
    def opens_thinking(self) -> bool:
        """Whether the text ends inside `<think>`."""
        return self.text.rstrip().endswith(THINK_OPEN)


class GuardedTemplate:
    """A chat template whose output tells the template's control tokens from text that looks like them."""

    def __init__(self, template: ChatTemplate, control: Sequence[str]) -> None:
        """Guard `template` against the control token texts `control`."""
        self.template = template
        self._begins = frozenset(text[:at] for text in control for at in range(1, len(text)))
        self._ends = frozenset(text[at:] for text in control for at in range(1, len(text)))
        self._pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)")
        self._first = re.compile("|".join(sorted({re.escape(text[0]) for text in control})) or "(?!)")
        self._longest = max(map(len, control), default=0)
        self._joined = "\0".join(control)
        self._nonce = str(10**27 + secrets.randbelow(9 * 10**27))
        self._sentinel = str(10**27 + secrets.randbelow(9 * 10**27))
        tree = _parse(template.source)
        self._rewrites = _rewrites(tree)
        self._composes = self._writes_parts(tree)

    def render(self, messages: Sequence[PlainMessage], tools: Tools, *, generation_prompt: bool) -> Rendered:
        """Return the text of a conversation with control tokens inside content broken.

        Raises:
            TokenError: the template refused the conversation, or lets content change the control tokens it writes.
        """
        render = self.template.render
        if not self._suspicious(messages) and not (tools and self._suspicious(tools)):
            return Rendered(render(messages, tools, generation_prompt=generation_prompt), "")
        text = render(*_changed(messages, tools, self._break), generation_prompt=generation_prompt)
        if self._rewrites:
            reference = render(*_changed(messages, tools, self._inert()), generation_prompt=generation_prompt)
            found, expected = self._pattern.findall(text), self._pattern.findall(reference)
            if found != expected:
                raise TokenError(
                    f"the chat template writes {len(found)} control tokens for these messages but {len(expected)} if their "
                    "text is replaced by plain words: it rewrites text that looks like markup; remove it from the messages"
                )
        return Rendered(text, self._nonce)

    def _suspicious(self, value: object) -> bool:
        if isinstance(value, str):
            return self._may_pose(value)
        if isinstance(value, dict):
            for key, item in cast("dict[str, object]", value).items():
                if self._may_pose(key, key in _STRUCTURE):
                    return True
                if self._may_pose(item, key in _TRUSTED_KEYS) if isinstance(item, str) else self._suspicious(item):
                    return True
            return False
        if isinstance(value, (list, tuple)):
            return any(map(self._suspicious, cast("Sequence[object]", value)))
        return False

    def _may_pose(self, text: str, structure: bool = False) -> bool:
        """Return whether a control token could begin in `text`, or end in it after a part the template writes."""
        return self._first.search(text) is not None or (self._composes and not structure and self._may_continue(text))

    def _may_continue(self, text: str) -> bool:
        bare = text.strip()
        if not bare:
            return False
        if len(bare) < self._longest and bare in self._joined:
            return True
        return any(bare[:size] in self._ends for size in range(1, min(self._longest, len(bare)) + 1))

    def _break(self, text: str, structure: bool) -> str:
        """Return `text` with no control token in it, whole or begun at its end or continued at its start."""
        if self._composes and not structure and self._may_continue(text):
            text = self._nonce + text
        if self._first.search(text) is None:
            return text
        while True:
            broken = self._pattern.sub(lambda match: match.group()[0] + self._nonce + match.group()[1:], text)
            if broken == text:
                break
            text = broken
        bare = text.rstrip()
        for at in range(max(0, len(bare) - self._longest), len(bare)):
            if bare[at:] in self._begins:
                return bare + self._nonce + text[len(bare) :]
        return text

    def _inert(self) -> _Change:
        """Return a change that replaces every text that could pose by digits, all different."""
        count = 0

        def change(text: str, structure: bool) -> str:
            nonlocal count
            if not text.strip() or not self._may_pose(text, structure):
                return text
            count += 1
            return f"{self._sentinel}{count}"

        return change

    def _writes_parts(self, tree: jinja2.nodes.Template) -> bool:
        """Return whether the template writes parts of control tokens, which content beside them could complete."""
        literals = {node.data for node in tree.find_all(jinja2.nodes.TemplateData)}
        literals |= {node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str)}
        for literal in literals:
            sizes = range(1, min(self._longest, len(literal)) + 1)
            if any(literal[-size:] in self._begins or literal[:size] in self._ends for size in sizes):
                return True
        return False


def _changed(messages: Sequence[PlainMessage], tools: Tools, change: _Change) -> tuple[list[PlainMessage], Tools]:
    return cast("list[PlainMessage]", _walk(messages, change)), cast("Tools", _walk(tools, change))


def _walk(value: object, change: _Change) -> object:
    if isinstance(value, str):
        return change(value, False)
    if isinstance(value, dict):
        changed: dict[str, object] = {}
        for key, item in cast("dict[str, object]", value).items():
            trusted = key in _TRUSTED_KEYS
            changed[change(key, key in _STRUCTURE)] = change(item, trusted) if isinstance(item, str) else _walk(item, change)
        return changed
    if isinstance(value, (list, tuple)):
        return [_walk(item, change) for item in cast("Sequence[object]", value)]
    return value


def _parse(source: str) -> jinja2.nodes.Template:
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return environment.parse(re.sub(r"\{%-?\s*(?:end)?generation\s*-?%\}", "", source))


def _rewrites(tree: jinja2.nodes.Template) -> bool:
    """Return whether a template may cut and join strings."""
    if any(node.name not in _SAFE_FILTERS for node in tree.find_all(jinja2.nodes.Filter)):
        return True
    called = (call.node for call in tree.find_all(jinja2.nodes.Call))
    if any(isinstance(node, jinja2.nodes.Getattr) and node.attr not in _SAFE_METHODS for node in called):
        return True
    return any(isinstance(node.arg, jinja2.nodes.Slice) for node in tree.find_all(jinja2.nodes.Getitem))
