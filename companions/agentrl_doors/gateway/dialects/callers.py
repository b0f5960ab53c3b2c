"""The marks by which known programs tell their agents apart: Claude Code, Codex and opencode.

Each rule is what a program was seen to send (`tests/clients` plays them). A program without marks of its own names roles by
a header or a path of the door.

Invariant: the main agent of a program has no role. Nothing here reads what the agents say to each other, except for the
first words of one program's title prompt, which sends nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, cast

from agentrl.tokens.messages import role_of, text_of
from agentrl_doors.gateway.dialect import Caller, DialectCall

SUBAGENT: Final = "subagent"
"""The role of an agent that another agent started."""
TITLE: Final = "title"
"""The role of a call for the title of a conversation."""
COMPACTION: Final = "compaction"
"""The role of a call that shortens a history."""
_MAX_CLIENT: Final = 60
_PRODUCT: Final = re.compile(r"[^\s()]+(?: v?\d[\w.]*)?")
_CODEX_SPAWNED: Final = "collab_spawn"
_CLAUDE_SUBAGENT: Final = re.compile(r"x-anthropic-billing-header: [^\n]*; cc_is_subagent=true;")
_CODEX_KIND: Final = re.compile(r"[a-z_]{1,40}")
_OPENCODE_TITLE: Final = "You are a title generator."


def chat_caller(call: DialectCall, headers: Mapping[str, str]) -> Caller:
    """Return the caller of chat completions: opencode sends the session of the agent that started another, and titles."""
    client = _client_name(headers)
    if headers.get("x-parent-session-id"):
        return Caller(client, SUBAGENT, headers.get("x-session-id", ""))
    is_title = headers.get("x-session-id") and "tools" not in call.arguments and _system(call).startswith(_OPENCODE_TITLE)
    return Caller(client, TITLE if is_title else "")


def responses_caller(call: DialectCall, headers: Mapping[str, str]) -> Caller:
    """Return the caller of Responses: Codex names the kind of a call that its main agent does not make, and its thread."""
    client, kind = _client_name(headers), headers.get("x-openai-subagent", "")
    if kind or headers.get("x-codex-parent-thread-id"):
        is_named = kind != _CODEX_SPAWNED and _CODEX_KIND.fullmatch(kind)
        return Caller(client, kind if is_named else SUBAGENT, headers.get("thread-id", ""))
    is_compaction = '"request_kind":"compaction"' in headers.get("x-codex-turn-metadata", "").replace(" ", "")
    return Caller(client, COMPACTION if is_compaction else "")


def messages_caller(call: DialectCall, headers: Mapping[str, str]) -> Caller:
    """Return the caller of Messages: Claude Code sends the id of a sub-agent, or says so in its system text."""
    client, agent = _client_name(headers), headers.get("x-claude-code-agent-id", "")
    if agent or _CLAUDE_SUBAGENT.match(_system(call)):
        return Caller(client, SUBAGENT, agent)
    is_of_claude = headers.get("x-claude-code-session-id") is not None
    return Caller(client, TITLE if is_of_claude and "tools" not in call.arguments and _asks_title(call) else "")


def _client_name(headers: Mapping[str, str]) -> str:
    """Return the first product of a User-Agent and its version."""
    found = _PRODUCT.match(headers.get("User-Agent", "").strip())
    return found[0][:_MAX_CLIENT] if found and found[0].isprintable() else ""


def _system(call: DialectCall) -> str:
    first: object = call.messages[0] if call.messages else None
    if not isinstance(first, Mapping) or role_of(cast("Mapping[str, object]", first)) not in ("system", "developer"):
        return ""
    return text_of(cast("Mapping[str, object]", first).get("content"), "system message")


def _asks_title(call: DialectCall) -> bool:
    """Return whether a call demands an object whose one field is a title."""
    found: object = call.arguments.get("response_format")
    for name in ("json_schema", "schema", "properties"):
        found = cast("Mapping[str, object]", found).get(name) if isinstance(found, Mapping) else None
    return isinstance(found, Mapping) and set(cast("Mapping[str, object]", found)) == {"title"}
