"""Plays model calls into a token graph and keeps, apart from it, what was sent and sampled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from agentrl.tokens.graph import Prompt, TokenGraph
from agentrl.tokens.renderer import Renderer
from agentrl.types import StopReason, Trajectory, Turn, VersionSpan


class Player:
    """A model that says what the test wants, in ids that a template would not write."""

    def __init__(self, renderer: Renderer, *, history: Literal["keep", "as_template"] = "keep") -> None:
        self.renderer = renderer
        self.turns: list[Turn] = []
        self.clock = itertools.count()
        self.graph = TokenGraph(renderer, episode_id="episode", history=history, clock=self.clock, turns=self.turns)
        self.sent: list[list[int]] = []
        self.sampled: list[list[int]] = []

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        """Return output ids of `text`, character by character, so that they differ from the encoding of the whole."""
        codec = self.renderer._codec  # pyright: ignore[reportPrivateUsage]
        pieces = codec.control_pattern.split(text)
        controls = codec.control_pattern.findall(text)
        ids: list[int] = []
        for at, piece in enumerate(pieces):
            ids += [number for letter in piece for number in codec.encode_rendered(letter, inside=True)]
            ids += [codec.control[control] for control in controls[at : at + 1]]
        return [*ids, self.renderer.end_of_turn_id or 0] if end else ids

    def answer(
        self, prompt: Prompt, text: str, *, end: bool = True, stop: str | None = None, version: int = 0
    ) -> dict[str, Any]:
        """Record a call and return the message a client would see."""
        ids = self.ids(text, end=end)
        self.sent.append([int(number) for number in b"".join(prompt.context.json).split(b",") if number])
        self.sampled.append(ids)
        turn = self.graph.append(
            prompt,
            output_ids=ids,
            output_logprobs=np.full(len(ids), -0.5, np.float32),
            spans=(VersionSpan(start=0, end=len(ids), version=version),) if ids else (),
            stop_reason=StopReason.STOP if end or stop else StopReason.LENGTH,
            matched_stop=self.renderer.end_of_turn_id if end else stop,
            temperature=1.0,
        )
        assert self.sent[-1] == prompt.context.ids().tolist()
        assert prompt.context.ids().dtype == np.int32
        assert prompt.context.size == len(self.sent[-1])
        assert prompt.context.bound == self.renderer.vocab_size > max(self.sent[-1], default=-1)
        return dict(self.graph.turns[turn].message)

    def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        text: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        end: bool = True,
        stop: str | None = None,
        version: int = 0,
    ) -> dict[str, Any]:
        """Prepare a request and answer it."""
        return self.answer(self.graph.prepare(messages, tools), text, end=end, stop=stop, version=version)

    def reward(self, turn: int, value: float) -> None:
        """Set the reward of a turn, as an episode does."""
        self.turns[turn] = replace(self.turns[turn], reward=value, rewarded_at=next(self.clock))

    def trajectory(self, final_reward: float = 1.0) -> Trajectory:
        """Return the record."""
        return Trajectory(
            episode_id="episode",
            task_id="task",
            turns=tuple(self.graph.turns),
            stop_reason=StopReason.COMPLETED,
            final_reward=final_reward,
        )

    def parents(self) -> list[int | None]:
        """Return the parent of each turn."""
        return [turn.parent for turn in self.graph.turns]

    def kept(self) -> list[bool]:
        """Return of each turn whether its context holds reasoning the template would have dropped."""
        return [turn.kept_thinking for turn in self.graph.turns]

    def forks(self) -> list[str | None]:
        """Return the fork reason of each turn."""
        return [turn.fork and turn.fork.value for turn in self.graph.turns]
