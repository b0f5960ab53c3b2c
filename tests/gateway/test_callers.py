"""Who calls, by the marks that Claude Code 2.1.197, Codex 0.169.0 and opencode 1.18.33 were seen to send."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from multidict import CIMultiDict

from agentrl_doors.gateway.dialect import Caller, Dialect
from agentrl_doors.gateway.dialects import ChatDialect, MessagesDialect, ResponsesDialect

CLAUDE = {"User-Agent": "claude-cli/2.1.197 (external, sdk-cli)", "X-Claude-Code-Session-Id": "bfebec60"}
CODEX = {
    "User-Agent": "codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)",
    "session-id": "main",
    "thread-id": "main",
    "x-codex-turn-metadata": json.dumps({"thread_id": "main", "agent_name": "/root", "request_kind": "turn"}),
}
OPENCODE = {"User-Agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14", "x-session-id": "ses_1"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.692; cc_entrypoint=sdk-cli;"
TOOLS = [{"name": "Bash", "input_schema": {"type": "object", "properties": {}}}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
TITLE_FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"title": {"type": "string"}}}}
HI = [{"role": "user", "content": "hi"}]


def claude(first: str, **more: object) -> dict[str, object]:
    return {"system": [{"type": "text", "text": first}, {"type": "text", "text": "Be."}], "messages": HI, **more}


def opencode(system: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "system", "content": system}, *HI], **more}


CASES: dict[str, tuple[Dialect, Mapping[str, object], Mapping[str, str], Caller]] = {
    "Claude Code": (MessagesDialect(), claude(BILLING, tools=TOOLS), CLAUDE, Caller("claude-cli/2.1.197")),
    "a sub-agent of Claude Code": (
        MessagesDialect(),
        claude(f"{BILLING} cc_is_subagent=true;", tools=TOOLS),
        {**CLAUDE, "x-claude-code-agent-id": "adea5d64"},
        Caller("claude-cli/2.1.197", "subagent", "adea5d64"),
    ),
    "a sub-agent of Claude Code without its header": (
        MessagesDialect(),
        claude(f"{BILLING} cc_is_subagent=true;", tools=TOOLS),
        CLAUDE,
        Caller("claude-cli/2.1.197", "subagent"),
    ),
    "a user who writes what marks a sub-agent": (
        MessagesDialect(),
        {"system": "Be.", "messages": [{"role": "user", "content": f"{BILLING} cc_is_subagent=true;"}], "tools": TOOLS},
        CLAUDE,
        Caller("claude-cli/2.1.197"),
    ),
    "the title of Claude Code": (
        MessagesDialect(),
        claude(BILLING, output_config={"effort": "high", "format": TITLE_FORM}),
        CLAUDE,
        Caller("claude-cli/2.1.197", "title"),
    ),
    "a title for another client": (
        MessagesDialect(),
        claude("Be.", output_config={"format": TITLE_FORM}),
        {"User-Agent": "Anthropic/Python 0.116.0"},
        Caller("Anthropic/Python 0.116.0"),
    ),
    "Codex": (ResponsesDialect(), {"input": "hi"}, CODEX, Caller("codex_exec/0.169.0")),
    "an agent that Codex spawned": (
        ResponsesDialect(),
        {"input": "hi"},
        {**CODEX, "thread-id": "t2", "x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "main"},
        Caller("codex_exec/0.169.0", "subagent", "t2"),
    ),
    "a review of Codex": (
        ResponsesDialect(),
        {"input": "hi"},
        {**CODEX, "thread-id": "t3", "x-openai-subagent": "review"},
        Caller("codex_exec/0.169.0", "review", "t3"),
    ),
    "an odd kind of Codex": (
        ResponsesDialect(),
        {"input": "hi"},
        {**CODEX, "thread-id": "t4", "x-openai-subagent": "an/odd one"},
        Caller("codex_exec/0.169.0", "subagent", "t4"),
    ),
    "a compaction of Codex": (
        ResponsesDialect(),
        {"input": "hi"},
        {**CODEX, "x-codex-turn-metadata": json.dumps({"request_kind": "compaction"})},
        Caller("codex_exec/0.169.0", "compaction"),
    ),
    "opencode": (ChatDialect(), opencode("You are opencode.", tools=CHAT_TOOLS), OPENCODE, Caller("opencode/1.18.33")),
    "a session that opencode opened for a task": (
        ChatDialect(),
        opencode("You are opencode.", tools=CHAT_TOOLS),
        {**OPENCODE, "x-session-id": "ses_2", "x-parent-session-id": "ses_1"},
        Caller("opencode/1.18.33", "subagent", "ses_2"),
    ),
    "the title of opencode": (
        ChatDialect(),
        opencode("You are a title generator. You output ONLY a thread title."),
        OPENCODE,
        Caller("opencode/1.18.33", "title"),
    ),
    "a client without marks": (
        ChatDialect(),
        {"messages": HI},
        {"user-agent": "Agents/Python 0.24.0"},
        Caller("Agents/Python 0.24.0"),
    ),
    "a client without a name": (ChatDialect(), {"messages": HI}, {}, Caller()),
    "a name that cannot be printed": (ChatDialect(), {"messages": HI}, {"User-Agent": "a\udcffb/1"}, Caller()),
    "messages that are none": (ChatDialect(), {"messages": ["hi", 3]}, OPENCODE, Caller("opencode/1.18.33")),
    "no messages": (ChatDialect(), {"messages": []}, OPENCODE, Caller("opencode/1.18.33")),
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_tells_its_agents_apart_by_its_own_marks(name: str) -> None:
    dialect, body, headers, expected = CASES[name]
    call = dialect.read(json.dumps(body).encode(), None)
    assert dialect.caller(call, CIMultiDict[Any](headers)) == expected
