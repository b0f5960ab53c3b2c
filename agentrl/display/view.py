"""What a display of an episode shows: its turns with their speakers, texts, tokens and numbers. No output, no colors.

The classes of `agentrl.types` fit the protocols here, so that they can use this room without it knowing them.

Invariant: everything shown is recorded, not computed again. Text keeps line breaks and tabs; any other control character is
shown as its escape, so that what a model writes cannot move the cursor or reverse the text around it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.foreign import visible

TokenDecoder: TypeAlias = Callable[[Sequence[int]], Sequence[str] | None]
"""Returns one text for each id; None where no tokenizer is known."""


class ShownTurn(Protocol):
    """The part of `agentrl.types.Turn` that is shown."""

    @property
    def context_ids(self) -> NDArray[np.int32]: ...
    @property
    def output_ids(self) -> NDArray[np.int32]: ...
    @property
    def output_logprobs(self) -> NDArray[np.float32]: ...
    @property
    def stop_reason(self) -> str: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def role(self) -> str: ...
    @property
    def player(self) -> str: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def message(self) -> Mapping[str, Any]: ...
    @property
    def messages(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def temperature(self) -> float: ...
    @property
    def fork(self) -> str | None: ...

    def output_versions(self) -> NDArray[np.int32]:
        """Return the policy version of each output token."""
        ...


class ShownFailure(Protocol):
    """The part of `agentrl.types.EpisodeFailure` that is shown."""

    @property
    def kind(self) -> str: ...
    @property
    def message(self) -> str: ...


class ShownEpisode(Protocol):
    """The part of `agentrl.types.Trajectory` that is shown."""

    @property
    def episode_id(self) -> str: ...
    @property
    def task_id(self) -> str: ...
    @property
    def turns(self) -> Sequence[ShownTurn]: ...
    @property
    def stop_reason(self) -> str: ...
    @property
    def final_reward(self) -> float | None: ...
    @property
    def failure(self) -> ShownFailure | None: ...
    @property
    def episode_return(self) -> float: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def reward_parts(self) -> Mapping[str, float]: ...
    @property
    def answer(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenText:
    """A message as a person reads it."""

    speaker: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token; `logprob` and `version` are None for a token that was not sampled."""

    text: str
    """Its text; its id where no tokenizer is known."""
    in_loss: bool
    """Whether the loss mask covers it."""
    logprob: float | None = None
    """Nats."""
    version: int | None = None

    @property
    def probability(self) -> float | None:
        """The probability with which it was sampled."""
        return None if self.logprob is None else math.exp(self.logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """What is shown of one turn."""

    heading: str
    """Number, player, parent and fork."""
    is_fork: bool
    """Whether the request did not extend the latest turn of its conversation."""
    facts: tuple[str, ...]
    """Versions, log-prob, reward, advantage, and what else is worth a word."""
    messages: tuple[SpokenText, ...]
    """What the call added."""
    answer: SpokenText
    tokens: tuple[ShownToken, ...]
    """Of the context that the call added and of the output; empty where tokens are not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """What is shown of an episode."""

    heading: str
    facts: tuple[str, ...]
    failure: str | None
    turns: tuple[TurnView, ...]


def view_of(
    episode: ShownEpisode,
    *,
    tokens: bool = False,
    texts: TokenDecoder | None = None,
    advantages: Sequence[float | None] | None = None,
) -> EpisodeView:
    """Return what is shown of an episode.

    Args:
        episode: a trajectory.
        tokens: whether to show each token.
        texts: returns the text of token ids; None: ids are shown.
        advantages: one for each turn; None: not known.
    """
    failed = episode.failure
    known: Sequence[float | None] = [None] * len(episode.turns) if advantages is None else advantages
    turns = [
        _turn_view(number, turn, in_loss=failed is None, tokens=tokens, texts=texts, advantage=advantage)
        for number, (turn, advantage) in enumerate(zip(episode.turns, known, strict=True))
    ]
    facts = [str(episode.stop_reason)]
    if failed is None:
        facts.append(f"return {episode.episode_return:g}")
    if episode.final_reward is not None:
        facts.append(f"final reward {episode.final_reward:g}")
    if episode.answer is not None:
        facts.append(visible(f"answer {episode.answer:.80}"))
    facts += [f"reward part {visible(name)} {value:g}" for name, value in episode.reward_parts.items()]
    facts += [f"{visible(name)} {value:g}" for name, value in episode.metrics.items()]
    return EpisodeView(
        heading=visible(f"episode {episode.episode_id}, task {episode.task_id}"),
        facts=tuple(facts),
        failure=None if failed is None else visible(f"{failed.kind}: {failed.message}"),
        turns=tuple(turns),
    )


def _turn_view(
    number: int, turn: ShownTurn, *, in_loss: bool, tokens: bool, texts: TokenDecoder | None, advantage: float | None
) -> TurnView:
    in_loss = in_loss and turn.temperature > 0
    heading = [f"turn {number}"]
    if turn.role:
        heading.append(turn.role)
    if turn.player:
        heading.append(f"player {turn.player}")
    if turn.parent is not None:
        heading.append(f"continues turn {turn.parent}")
    if turn.fork is not None:
        heading.append(f"fork: {turn.fork}")
    return TurnView(
        heading=visible(", ".join(heading)),
        is_fork=turn.fork is not None,
        facts=tuple(_turn_facts(turn, in_loss, advantage)),
        messages=tuple(map(_spoken, turn.messages)),
        answer=_spoken(turn.message),
        tokens=tuple(_shown_tokens(turn, in_loss, texts)) if tokens else (),
    )


def _turn_facts(turn: ShownTurn, in_loss: bool, advantage: float | None) -> list[str]:
    facts: list[str] = []
    count = len(turn.output_ids)
    if count:
        versions = turn.output_versions()
        low, high = int(versions.min()), int(versions.max())
        mean = float(turn.output_logprobs.mean())
        facts += [f"version {low}" if low == high else f"versions {low} to {high}"]
        facts += [f"{count} tokens, {count if in_loss else 0} in the loss"]
        facts += [f"mean log-prob {mean:.3f}"]
    if turn.reward is not None:
        facts.append(f"reward {turn.reward:g}")
    if advantage is not None:
        facts.append(f"advantage {advantage:+.3g}")
    if turn.temperature == 0:
        facts.append("greedy")
    if turn.stop_reason != "stop":
        facts.append(f"ended by {turn.stop_reason}")
    return facts


def _spoken(message: Mapping[str, Any]) -> SpokenText:
    parts: list[str] = []
    if reasoning := message.get("reasoning_content"):
        parts.append(f"(reasoning) {reasoning}")
    content = message.get("content")
    if content:
        parts.append(content if isinstance(content, str) else json.dumps(content, default=repr, ensure_ascii=False))
    calls: object = message.get("tool_calls")
    for call in cast("Sequence[Any]", calls) if isinstance(calls, Sequence) else ():
        function: Any = call.get("function", call) if isinstance(call, Mapping) else call
        named = cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {"name": repr(function)}
        parts.append(f"calls {named.get('name')}({named.get('arguments', '')})")
    return SpokenText(speaker=visible(str(message.get("role", ""))), text=visible("\n".join(parts)))


def _shown_tokens(turn: ShownTurn, in_loss: bool, texts: TokenDecoder | None) -> list[ShownToken]:
    ids = [*turn.context_ids.tolist(), *turn.output_ids.tolist()]
    found = None if texts is None else texts(ids)
    shown = [visible(text) for text in found] if found is not None else [f"{number} " for number in ids]
    start = len(turn.context_ids)
    context = [ShownToken(text=text, in_loss=False) for text in shown[:start]]
    logprobs, versions = turn.output_logprobs.tolist(), turn.output_versions().tolist()
    return context + [
        ShownToken(text=text, in_loss=in_loss, logprob=logprob, version=version)
        for text, logprob, version in zip(shown[start:], logprobs, versions, strict=True)
    ]
