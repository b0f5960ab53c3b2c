"""Placing: from where a request meets the known conversations to its parent turn, its context ids and its fork reason.

Invariant: what a request adds is rendered from its new messages where the template allows it; where it does not, or where a
fork asks for it, from the whole conversation. Model outputs rendered again are context, never trained.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl.tokens.match import Match, TurnIndex
from agentrl.tokens.messages import role_of
from agentrl.tokens.prompt import Placed, PromptBuilder
from agentrl.tokens.renderer import Renderer
from agentrl.types import ForkReason, Message, Turn

Tools = Sequence[Mapping[str, Any]] | None

_THINKING = re.compile(r"<think>(?:.*?</think>\s*|\s*\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TurnTree:
    """The recorded turns with what placing needs to know of each; the graph appends to all lists together."""

    turns: list[Turn]
    index: TurnIndex
    tools: list[bytes]
    """Key of the tools of the turn's request."""
    lengths: list[int]
    """Messages of the turn's conversation, its output included; 0 for a call made of ids."""
    last_ids: array[int]
    """The last sampled id of the turn; -1 where it sampled none."""
    thought: list[bool]
    """Whether the ids up to the turn's end hold reasoning."""


class Placer:
    """Places the requests of one episode."""

    def __init__(
        self, renderer: Renderer, tree: TurnTree, prompts: PromptBuilder, *, history: Literal["keep", "as_template"]
    ) -> None:
        """Place over `tree`.

        Args:
            renderer: the model's renderer.
            tree: the recorded turns; grows as turns are recorded.
            prompts: knows the ids from the root to the end of a turn.
            history: see `TokenGraph`.
        """
        self._renderer = renderer
        self._tree = tree
        self._history = history
        self._prompts = prompts

    def place(self, match: Match, messages: Sequence[Message], tools: Tools) -> Placed:
        """Return the context of a request and the turn it follows.

        Args:
            match: where its messages meet the known conversations.
            messages: its messages.
            tools: its tools.

        Raises:
            TokenError: if the template refuses the messages.
        """
        fork: ForkReason | None = None
        if match.length_any_tools > match.length:
            fork = ForkReason.TOOLS_CHANGED
        elif match.edited:
            fork = ForkReason.HISTORY_EDITED
        turn = match.turn
        if turn is None:
            return self._root(match, messages, tools, fork)
        renderer, tree, new = self._renderer, self._tree, match.new
        if new is None:
            new = renderer.plain(messages[match.length :], self._reasoning(match, messages, start=match.length))
        kept, last_id = tree.turns[turn].kept_thinking, tree.last_ids[turn]
        if self._history == "keep" and not tree.thought[turn]:
            filled = renderer.fill(new, bool(tools), last_output_id=last_id)
            if filled is not None:
                return Placed(turn, *filled, fork, kept)
        shape = renderer.shape(new, bool(tools))
        if not shape.complete:
            return self._root(match, messages, tools, fork or ForkReason.TEMPLATE_CHANGED)
        if shape.rewrites and self._history == "as_template":
            stripped = self._rewritten(match, turn, messages, tools)
            if stripped is not None:
                return self._as_template(match, turn, messages, tools, fork or stripped)
        elif shape.rewrites_thinking:
            kept = kept or tree.thought[turn]
        history = [] if shape.local else renderer.plain(messages[: match.length], self._reasoning(match, messages))
        context = renderer.extend(history, new, tools, last_output_id=last_id)
        return Placed(turn, context.ids, context.thinking_open, fork, kept)

    def _root(self, match: Match, messages: Sequence[Message], tools: Tools, fork: ForkReason | None) -> Placed:
        plain = self._renderer.plain(messages, self._reasoning(match, messages))
        context = self._renderer.start(plain, tools)
        return Placed(None, context.ids, context.thinking_open, fork)

    def _reasoning(self, match: Match, messages: Sequence[Message], start: int = 0) -> dict[int, str]:
        """Return the recorded reasoning of model outputs among `messages[start:]`, by position from `start`."""
        found: dict[int, str] = {}
        if not any(self._tree.thought):
            return found
        for at in range(start, len(messages)):
            turn = self._tree.index.output_turn(match.keys(), at) if role_of(messages[at]) == "assistant" else None
            text = None if turn is None else self._tree.turns[turn].message.get("reasoning_content")
            if text:
                found[at - start] = text
        if start >= match.length:
            return found
        for turn in self._ancestors(match.turn):
            at = self._tree.lengths[turn] - 1 - start
            text = self._tree.turns[turn].message.get("reasoning_content")
            if at >= 0 and text:
                found[at] = text
            else:
                found.pop(at, None)
        return found

    def _ancestors(self, turn: int | None) -> list[int]:
        found: list[int] = []
        while turn is not None:
            found.append(turn)
            turn = self._tree.turns[turn].parent
        return found

    def _rewritten(self, match: Match, turn: int, messages: Sequence[Message], tools: Tools) -> ForkReason | None:
        """Return why the template no longer writes what `turn` and its context hold; None if it does."""
        plain = self._renderer.plain(messages, self._reasoning(match, messages))
        whole = self._renderer.render_text(plain, tools, generation_prompt=True)
        length = self._tree.lengths[turn]
        asked = self._renderer.render_text(plain[: length - 1], tools, generation_prompt=True)
        answered = self._renderer.render_text(plain[:length], tools, generation_prompt=False)
        held = self._renderer.decode(self._prompts.path_ids(turn), skip_special=False)
        if (whole.startswith(asked) and whole.startswith(answered)) or whole.startswith(held):
            return None
        bare = _THINKING.sub("", whole)
        if bare.startswith(_THINKING.sub("", asked)) and bare.startswith(_THINKING.sub("", answered)):
            return ForkReason.THINKING_STRIPPED
        return ForkReason.TEMPLATE_CHANGED

    def _as_template(self, match: Match, turn: int, messages: Sequence[Message], tools: Tools, fork: ForkReason) -> Placed:
        """Fork from the deepest ancestor whose text the template still writes."""
        parent = self._tree.turns[turn].parent
        while parent is not None and (
            self._tree.lengths[parent] == 0 or self._rewritten(match, parent, messages, tools) is not None
        ):
            parent = self._tree.turns[parent].parent
        if parent is None:
            return self._root(match, messages, tools, fork)
        length = self._tree.lengths[parent]
        new = self._renderer.plain(messages[length:], self._reasoning(match, messages, start=length))
        if not self._renderer.shape(new, bool(tools)).complete:
            return self._root(match, messages, tools, fork)
        history = self._renderer.plain(messages[:length], self._reasoning(match, messages))
        context = self._renderer.extend(history, new, tools, last_output_id=self._tree.last_ids[parent])
        return Placed(parent, context.ids, context.thinking_open, fork)
