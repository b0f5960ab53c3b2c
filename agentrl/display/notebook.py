"""An episode as HTML for a notebook: self-contained, on light and on dark pages.

Invariant: every text is escaped; the markup has no script, and loads nothing.
"""

from __future__ import annotations

from html import escape

from agentrl.display.view import EpisodeView, ShownToken, SpokenText, TurnView

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
