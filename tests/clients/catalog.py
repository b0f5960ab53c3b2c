"""The clients that are played, each with the command that a user gives, and the replies of the model that it meets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from agentrl.client import Door

ROOT: Final = Path(__file__).parents[2]
PROGRAMS: Final = Path(__file__).parent / "programs"
NODE: Final = ROOT / ".clients-node"
TASK: Final = "Write a greeting into hello.txt, read it back, and say what the file holds."
CONTENT: Final = "h\u00e9llo there"
ANSWER: Final = f"The file holds {CONTENT}."
WRITE: Final = f"printf '{CONTENT}' > hello.txt"
READ: Final = "cat hello.txt"
DialectName = Literal["chat", "responses", "messages"]
ID_PREFIXES: Final[Mapping[str, str]] = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}


def _nothing(home: Path, door: Door) -> None:
    """Prepare nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProgram:
    """One client in one of its modes."""

    client: str
    package: str
    """The installer and the name by which the pins know it."""
    dialect: DialectName
    mode: str = ""
    command: Sequence[str]
    """The program and its arguments; the task comes last."""
    bin_folder: Path
    replies: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    prepare: Callable[[Path, Door], None] = _nothing
    """Writes the files of the client's configuration into its home."""
    forced_calls: bool = False
    """Whether it demands a tool call, which a run file has to allow (`sampling.unsupported: prompt`)."""
    branches: int = 1
    forks: Mapping[str, int] = field(default_factory=dict[str, int])
    """Forks of a linear run, by reason."""
    why: str = ""
    """The reason why a linear run is not one branch."""

    @property
    def name(self) -> str:
        """The name of its test."""
        return f"{self.client}-{self.mode}" if self.mode else self.client

    @property
    def id_prefix(self) -> str:
        """The first characters of the ids of answers."""
        return ID_PREFIXES[self.dialect]

    def check_installed(self) -> None:
        """Raise `AssertionError` if the program is missing."""
        assert Path(self.command[0]).exists(), f"{self.command[0]} is missing; run `make test-clients`, which installs it"


def tool_call(name: str, arguments: str) -> str:
    """Return a call of a tool as the model writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def replies_of(tool: str, argument: str, rest: str = "") -> list[str]:
    """Return the replies of the model, whose arguments are legal JSON that few writers would write.

    Args:
        tool: the name of the tool that runs a command.
        argument: the name of its argument.
        rest: more arguments, as JSON members with a comma at their end.
    """

    def arguments(command: str) -> str:
        return "{ " + rest + f'"{argument}" :  {json.dumps(command)} ' + "}"

    return [
        "I write the file.\n" + tool_call(tool, arguments(WRITE)),
        "Now I read it.\n" + tool_call(tool, arguments(READ)),
        ANSWER,
    ]


SDK_REPLIES: Final = replies_of("bash", "command", '"timeout" : 6.00e1 , ')
CLAUDE_REPLIES: Final = replies_of("Bash", "command", '"timeout" : 60000.0 , "description" : "Runs a command" , ')
LEAN_CLAUDE: Final = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "IS_SANDBOX": "1",
}
"""Settings of Claude Code without a network; the last one lets root run it."""


def _python(
    client: str, package: str, program: str, mode: str, dialect: DialectName, *, openai: int = 3, **more: object
) -> ClientProgram:
    folder = ROOT / ".clients-venv" / f"openai{openai}" / "bin"
    settings: dict[str, object] = {
        "client": client,
        "package": package,
        "dialect": dialect,
        "mode": mode,
        "command": (str(folder / "python"), str(PROGRAMS / program), mode),
        "bin_folder": folder,
        "replies": SDK_REPLIES,
        **more,
    }
    return ClientProgram(**settings)  # pyright: ignore[reportArgumentType] - by name


PYTHON_CLIENTS: Final = (
    _python("openai", "pip openai", "openai_sdk.py", "chat", "chat"),
    _python("openai", "pip openai", "openai_sdk.py", "chat-stream", "chat"),
    _python("openai", "pip openai", "openai_sdk.py", "responses", "responses"),
    _python("openai", "pip openai", "openai_sdk.py", "responses-stream", "responses"),
    _python("openai", "pip openai", "openai_sdk.py", "responses-by-id", "responses"),
    _python("anthropic", "pip anthropic", "anthropic_sdk.py", "loop", "messages"),
    _python("anthropic", "pip anthropic", "anthropic_sdk.py", "stream", "messages"),
    _python("anthropic", "pip anthropic", "anthropic_sdk.py", "runner", "messages"),
    _python("openai-agents", "pip openai-agents", "openai_agents_sdk.py", "responses", "responses"),
    _python("openai-agents", "pip openai-agents", "openai_agents_sdk.py", "stream", "responses"),
    _python("openai-agents", "pip openai-agents", "openai_agents_sdk.py", "by-id", "responses"),
    _python("openai-agents", "pip openai-agents", "openai_agents_sdk.py", "chat", "chat"),
    _python("pydantic-ai", "pip pydantic-ai-slim", "pydantic_ai_agent.py", "chat", "chat"),
    _python("pydantic-ai", "pip pydantic-ai-slim", "pydantic_ai_agent.py", "responses", "responses"),
    _python("pydantic-ai", "pip pydantic-ai-slim", "pydantic_ai_agent.py", "messages", "messages"),
    _python("langchain-openai", "pip langchain-openai", "langchain_agent.py", "chat", "chat"),
    _python("langchain-openai", "pip langchain-openai", "langchain_agent.py", "chat-stream", "chat"),
    _python("langchain-openai", "pip langchain-openai", "langchain_agent.py", "responses", "responses"),
    _python("litellm", "pip litellm", "litellm_loop.py", "chat", "chat", openai=2),
    _python("litellm", "pip litellm", "litellm_loop.py", "chat-stream", "chat", openai=2),
    _python(
        "smolagents",
        "pip smolagents",
        "smolagents_agent.py",
        "",
        "chat",
        forced_calls=True,
        branches=3,
        forks={"new_conversation": 2},
        why="It sends its own calls back as text of its own words, so no later request holds what the model wrote.",
        replies=(*SDK_REPLIES[:2], tool_call("final_answer", json.dumps({"answer": ANSWER}))),
    ),
    _python(
        "claude-agent-sdk",
        "pip claude-agent-sdk",
        "claude_agent.py",
        "",
        "messages",
        replies=CLAUDE_REPLIES,
        environment=LEAN_CLAUDE,
    ),
)


def _linked_modules(home: Path, door: Door) -> None:
    """Put the program where Node.js finds the packages."""
    (home / "node_modules").symlink_to(NODE / "node_modules")
    shutil.copy(PROGRAMS / "ai_sdk.mjs", home)


def _codex_settings(home: Path, door: Door) -> None:
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model = "policy"\nmodel_provider = "door"\ncheck_for_update_on_startup = false\n[analytics]\nenabled = false\n'
        f'[model_providers.door]\nname = "door"\nbase_url = "{door.base_url}"\nenv_key = "OPENAI_API_KEY"\n'
        'wire_api = "responses"\n'
    )


def _opencode_settings(home: Path, door: Door) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "door",
        "options": {"baseURL": door.base_url, "apiKey": door.key},
        "models": {"policy": {"name": "policy", "limit": {"context": 200000, "output": 4096}}},
    }
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "enabled_providers": ["door"],
        "model": "door/policy",
        "permission": "allow",
        "provider": {"door": provider},
    }
    (home / "opencode.json").write_text(json.dumps(settings))


def _pi_settings(home: Path, door: Door) -> None:
    def provider(api: str, url: str, *, reasoning: bool) -> dict[str, object]:
        models = [{"id": "policy", "reasoning": reasoning}]
        return {"baseUrl": url, "api": api, "apiKey": door.key, "models": models}

    providers = {
        "chat": provider("openai-completions", door.base_url, reasoning=False),
        "responses": provider("openai-responses", door.base_url, reasoning=True),
        "messages": provider("anthropic-messages", door.url, reasoning=True),
    }
    (home / "models.json").write_text(json.dumps({"providers": providers}))


def _node(
    client: str,
    package: str,
    command: Sequence[str],
    mode: str,
    dialect: DialectName,
    replies: Sequence[str],
    environment: Mapping[str, str],
    prepare: Callable[[Path, Door], None],
) -> ClientProgram:
    folder = NODE / "node_modules" / ".bin"
    first = command[0] if command[0].startswith("/") else str(folder / command[0])
    return ClientProgram(
        client=client,
        package=package,
        dialect=dialect,
        mode=mode,
        command=(first, *command[1:]),
        bin_folder=folder,
        replies=replies,
        environment=environment,
        prepare=prepare,
    )


def _typescript(client: str, package: str, mode: str, dialect: DialectName) -> ClientProgram:
    node = shutil.which("node") or "/usr/bin/node"
    return _node(client, package, (node, "../home/ai_sdk.mjs", mode), mode, dialect, SDK_REPLIES, {}, _linked_modules)


def _pi(mode: DialectName) -> ClientProgram:
    command = ("pi", "-p", "--provider", mode, "--model", "policy")
    settings = {"PI_CODING_AGENT_DIR": "../home", "PI_OFFLINE": "1"}
    replies = replies_of("bash", "command", '"timeout" : 6.0e1 , ')
    return _node("pi", "npm @mariozechner/pi-coding-agent", command, mode, mode, replies, settings, _pi_settings)


TYPESCRIPT_CLIENTS: Final = (
    _typescript("AI SDK", "npm ai", "chat", "chat"),
    _typescript("AI SDK", "npm ai", "chat-stream", "chat"),
    _typescript("AI SDK", "npm ai", "responses", "responses"),
    _typescript("AI SDK", "npm ai", "messages", "messages"),
    _typescript("openai for JavaScript", "npm openai", "run-tools", "chat"),
)
PROGRAM_CLIENTS: Final = (
    ClientProgram(
        client="mini-swe-agent",
        package="pip mini-swe-agent",
        dialect="chat",
        command=(
            str(ROOT / ".clients-venv" / "openai2" / "bin" / "mini"),
            *("-y", "--exit-immediately", "-m", "openai/policy", "-c", "mini.yaml", "-c", "agent.mode=yolo", "-t"),
        ),
        bin_folder=ROOT / ".clients-venv" / "openai2" / "bin",
        replies=(
            *replies_of("bash", "command")[:2],
            tool_call("bash", json.dumps({"command": f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo '{ANSWER}'"})),
        ),
        environment={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
    _node(
        "Codex",
        "npm @openai/codex",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        "",
        "responses",
        replies_of("exec_command", "cmd"),
        {},
        _codex_settings,
    ),
    _node(
        "Claude Code",
        "npm @anthropic-ai/claude-code",
        ("claude", "--model", "policy", "--dangerously-skip-permissions", "--max-turns", "8", "-p"),
        "",
        "messages",
        CLAUDE_REPLIES,
        LEAN_CLAUDE,
        _nothing,
    ),
    _node(
        "opencode",
        "npm opencode-ai",
        ("opencode", "run", "--title", "fixed", "-m", "door/policy"),
        "",
        "chat",
        replies_of("bash", "command", '"timeout" : 6.00e4 , "description" : "Runs a command" , '),
        {
            "OPENCODE_CONFIG": "../home/opencode.json",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        _opencode_settings,
    ),
    _pi("chat"),
    _pi("responses"),
    _pi("messages"),
)
CLIENTS: Final[tuple[ClientProgram, ...]] = (*PYTHON_CLIENTS, *TYPESCRIPT_CLIENTS, *PROGRAM_CLIENTS)
