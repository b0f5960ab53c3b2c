"""Harmony (gpt-oss): an output is messages in channels; reasoning, calls and the answer each have one.

`<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.NAME json<|message|>{...}`
"""

from __future__ import annotations

import re

from agentrl.tokens.parse import ParsedCalls, RawCall, Schemas, ThinkingSplit, ToolFormat, make_call, parse_json

_START, _CHANNEL, _MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
_HEADER = re.compile(
    r"\s*(?:to=(?P<before>\S+?)\s*)?<\|channel\|>(?P<channel>\w+)(?:\s+to=(?P<after>[^\s<]+))?"
    r"\s*(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
)
_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def _channel_parts(text: str) -> list[tuple[str, str | None, str, str]] | None:
    """Return channel, recipient, body and whole text of each message; None if the text is not in this form."""
    parts: list[tuple[str, str | None, str, str]] = []
    for piece in text.split(_START):
        if not piece.strip() and not parts:
            continue
        header = _HEADER.match(piece)
        if header is None:
            return None
        body = piece[header.end() :]
        for end in _ENDS:
            body = body.removesuffix(end)
        parts.append((header["channel"], header["before"] or header["after"], body, piece))
    return parts


def _without_analysis(text: str) -> ThinkingSplit:
    """Take the analysis off the front; the rest stays in its form, for `_read_channels`."""
    parts = _channel_parts(text) if _CHANNEL in text else None
    if parts is None:
        return ThinkingSplit(None, text, False)
    reasoning = "\n".join(body for channel, to, body, _ in parts if channel == "analysis" and to is None)
    rest = [piece for channel, to, _, piece in parts if channel != "analysis" or to is not None]
    if not rest:
        return ThinkingSplit(reasoning or None, "", True)
    return ThinkingSplit(reasoning or None, _START.join(rest), False)


def _read_channels(text: str, tools: Schemas) -> ParsedCalls:
    parts = _channel_parts(text) if _CHANNEL in text else None
    if parts is None:
        return ParsedCalls(text, [], _CHANNEL in text)
    kept: list[str] = []
    calls: list[RawCall] = []
    malformed = False
    for _, recipient, body, piece in parts:
        if recipient is None:
            kept.append(body)
            continue
        call = make_call(recipient.removeprefix("functions."), parse_json(body)) if tools else None
        if call is None:
            malformed = True
            kept.append(piece)
        else:
            calls.append(call)
    return ParsedCalls("\n".join(kept), calls, malformed)


HARMONY = ToolFormat(name="harmony", openings=(_CHANNEL,), read=_read_channels, split=_without_analysis)
