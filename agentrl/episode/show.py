"""An episode for a person: as text in a terminal, and as HTML in a notebook.

Invariant: everything shown is recorded, not computed again. Text keeps line breaks and tabs; any other control character is
shown as its escape, so that no text of a model can move the cursor or reverse the text around it. The HTML escapes every
text; it has no script, and loads nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.support.foreign import visible

if TYPE_CHECKING:
    from agentrl.episode.trajectory import TokenDecoder, Trajectory, Turn  # which draws itself with this module

_SPEAKERS = {"system": "magenta", "developer": "magenta", "user": "cyan", "tool": "yellow", "assistant": "green"}
_STYLE = """
.agentrl-episode { font: 13px/1.5 system-ui, sans-serif; color: inherit; max-width: 60em; }
.agentrl-episode .facts { opacity: 0.7; font-size: 12px; }
.agentrl-episode .turn { border-left: 3px solid rgba(128, 128, 128, 0.4); margin: 0.8em 0; padding-left: 0.8em; }
.agentrl-episode .fork { border-left-color: rgba(220, 130, 0, 0.9); }
.agentrl-episode .message { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0.2em 0; }
.agentrl-episode .speaker { font-weight: 600; opacity: 0.8; }
.agentrl-episode .answer { background: rgba(60, 160, 90, 0.13); border-radius: 4px; padding: 0.1em 0.4em; }
.agentrl-episode .failure { color: rgb(214, 69, 65); white-space: pre-wrap; }
.agentrl-episode .tokens { white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.8 ui-monospace, monospace; }
.agentrl-episode .token { border-radius: 3px; }
.agentrl-episode .context { opacity: 0.55; }
.agentrl-episode .loss { border-bottom: 1px solid currentColor; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenText:
    """A message as a person reads it."""

    speaker: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token; `logprob` (nats) and `version` are None for a token that was not sampled."""

    text: str
    """Its text; its id where no tokenizer is known."""
    in_loss: bool
    logprob: float | None = None
    version: int | None = None

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(self.logprob)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """The shown parts of a turn."""

    heading: str
    """Number, player, parent and fork."""
    is_fork: bool
    """Whether the request did not extend the latest turn of its conversation."""
    facts: tuple[str, ...]
    """Versions, log-prob, reward, advantage, and what else is worth a word."""
    messages: tuple[SpokenText, ...]
    """The messages that the call added."""
    answer: SpokenText
    tokens: tuple[ShownToken, ...]
    """Of the context that the call added and of the output; empty where tokens are not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """The shown parts of an episode."""

    heading: str
    facts: tuple[str, ...]
    failure: str | None
    turns: tuple[TurnView, ...]


def view_of(
    episode: Trajectory,
    *,
    tokens: bool = False,
    texts: TokenDecoder | None = None,
    advantages: Sequence[float | None] | None = None,
) -> EpisodeView:
    """Return the view of an episode; with `tokens` of each token, by its text where `texts` gives it, else by its id.

    `advantages` has one entry for each turn.
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
    number: int, turn: Turn, *, in_loss: bool, tokens: bool, texts: TokenDecoder | None, advantage: float | None
) -> TurnView:
    in_loss = in_loss and turn.in_loss
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


def _turn_facts(turn: Turn, in_loss: bool, advantage: float | None) -> list[str]:
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
    if turn.dialect:
        facts.append(visible(f"asked by {turn.client or 'a program without a name'}, {turn.dialect}"))
    if turn.temperature == 0:
        facts.append("greedy")
    if turn.truncated_by:
        facts.append("truncated by " + truncation_text(turn.truncated_by))
    if turn.left_out:
        facts.append("left out of training")
    if turn.stop_reason != "stop":
        facts.append(f"ended by {turn.stop_reason}")
    return facts


def truncation_text(settings: Mapping[str, float]) -> str:
    """Return the settings that truncate sampling as text: `top_p 0.9, top_k 40`."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


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


def _shown_tokens(turn: Turn, in_loss: bool, texts: TokenDecoder | None) -> list[ShownToken]:
    ids = [*turn.context_ids.tolist(), *turn.output_ids.tolist()]
    pieces = None if texts is None else texts(ids)
    shown = [visible(text) for text in pieces] if pieces is not None else [f"{number} " for number in ids]
    start = len(turn.context_ids)
    context = [ShownToken(text=text, in_loss=False) for text in shown[:start]]
    logprobs, versions = turn.output_logprobs.tolist(), turn.output_versions().tolist()
    return context + [
        ShownToken(text=text, in_loss=in_loss, logprob=logprob, version=version)
        for text, logprob, version in zip(shown[start:], logprobs, versions, strict=True)
    ]


def print_view(view: EpisodeView, console: Console | None = None) -> None:
    """Print an episode; None: to standard output."""
    console = console or Console()
    console.print(Text(view.heading, style="bold"))
    console.print(Text("  " + ", ".join(view.facts), style="dim"))
    if view.failure is not None:
        console.print(Text("  failed: " + view.failure, style="red"))
    for turn in view.turns:
        console.print()
        _print_turn(turn, console)


def _print_turn(turn: TurnView, console: Console) -> None:
    console.print(Text(turn.heading, style="bold"), Text(", ".join(turn.facts), style="dim"))
    for message in (*turn.messages, turn.answer):
        console.print(_spoken_line(message))
    if turn.tokens:
        console.print(_token_table(turn.tokens))


def _spoken_line(message: SpokenText) -> Text:
    style = _SPEAKERS.get(message.speaker, "blue")
    return Text.assemble((f"  {message.speaker}: ", f"bold {style}"), message.text)


def _token_table(tokens: tuple[ShownToken, ...]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("token")
    for name in ("loss", "version", "log-prob", "probability"):
        table.add_column(name, justify="right")
    context = [token for token in tokens if token.logprob is None]
    if context:
        joined = " ".join(repr(token.text)[1:-1] for token in context)
        table.add_row(Text(joined, style="dim"), Text("0"), Text(f"{len(context)} of context", style="dim"))
    for token in tokens:
        if token.logprob is None or token.probability is None:
            continue
        table.add_row(
            Text(repr(token.text)[1:-1]),
            Text("1" if token.in_loss else "0"),
            Text(str(token.version)),
            Text(f"{token.logprob:.3f}"),
            Text(f"{token.probability:.3f}"),
        )
    return table


def html_of(view: EpisodeView) -> str:
    """Return an episode as an HTML fragment."""
    failure = "" if view.failure is None else f'<div class="failure">failed: {escape(view.failure)}</div>'
    return (
        f'<div class="agentrl-episode"><style>{_STYLE}</style>'
        f'<strong>{escape(view.heading)}</strong><div class="facts">{escape(", ".join(view.facts))}</div>'
        f"{failure}{''.join(map(_turn_html, view.turns))}</div>"
    )


def _turn_html(turn: TurnView) -> str:
    kind = "turn fork" if turn.is_fork else "turn"
    tokens = f'<div class="tokens">{"".join(map(_token_html, turn.tokens))}</div>' if turn.tokens else ""
    messages = "".join(_message_html(message, "") for message in turn.messages)
    facts = f'<span class="facts">{escape(", ".join(turn.facts))}</span>'
    return (
        f'<div class="{kind}"><strong>{escape(turn.heading)}</strong> {facts}'
        f"{messages}{_message_html(turn.answer, ' answer')}{tokens}</div>"
    )


def _message_html(message: SpokenText, kind: str) -> str:
    return f'<div class="message{kind}"><span class="speaker">{escape(message.speaker)}:</span> {escape(message.text)}</div>'


def _token_html(token: ShownToken) -> str:
    if token.probability is None or token.logprob is None:
        return f'<span class="token context" title="context, not in the loss">{escape(token.text)}</span>'
    loss = "in the loss" if token.in_loss else "not in the loss"
    title = f"version {token.version}, log-prob {token.logprob:.3f}, probability {token.probability:.3f}, {loss}"
    kind = "token loss" if token.in_loss else "token"
    surprise = f"background: rgba(220, 60, 60, {0.6 * (1 - token.probability):.2f})"
    return f'<span class="{kind}" style="{surprise}" title="{escape(title)}">{escape(token.text)}</span>'
