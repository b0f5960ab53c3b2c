"""The clients that are played, each with the command that a user gives, and the replies of the model that it meets."""

from __future__ import annotations

import json
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
    """The name by which the pins know it."""
    dialect: DialectName
    mode: str = ""
    command: Sequence[str]
    """The program and its arguments; the task comes last."""
    bin_folder: Path
    replies: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    prepare: Callable[[Path, Door], None] = _nothing
    """Writes the files of the client's configuration into its home."""
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
    _python("openai", "openai", "openai_sdk.py", "chat", "chat"),
    _python("openai", "openai", "openai_sdk.py", "chat-stream", "chat"),
    _python("openai", "openai", "openai_sdk.py", "responses", "responses"),
    _python("openai", "openai", "openai_sdk.py", "responses-stream", "responses"),
    _python("openai", "openai", "openai_sdk.py", "responses-by-id", "responses"),
    _python("anthropic", "anthropic", "anthropic_sdk.py", "loop", "messages"),
    _python("anthropic", "anthropic", "anthropic_sdk.py", "stream", "messages"),
    _python("anthropic", "anthropic", "anthropic_sdk.py", "runner", "messages"),
    _python("openai-agents", "openai-agents", "openai_agents_sdk.py", "responses", "responses"),
    _python("openai-agents", "openai-agents", "openai_agents_sdk.py", "stream", "responses"),
    _python("openai-agents", "openai-agents", "openai_agents_sdk.py", "by-id", "responses"),
    _python("openai-agents", "openai-agents", "openai_agents_sdk.py", "chat", "chat"),
    _python("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agent.py", "chat", "chat"),
    _python("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agent.py", "responses", "responses"),
    _python("pydantic-ai", "pydantic-ai-slim", "pydantic_ai_agent.py", "messages", "messages"),
    _python("langchain-openai", "langchain-openai", "langchain_agent.py", "chat", "chat"),
    _python("langchain-openai", "langchain-openai", "langchain_agent.py", "chat-stream", "chat"),
    _python("langchain-openai", "langchain-openai", "langchain_agent.py", "responses", "responses"),
    _python("litellm", "litellm", "litellm_loop.py", "chat", "chat", openai=2),
    _python("litellm", "litellm", "litellm_loop.py", "chat-stream", "chat", openai=2),
)
CLIENTS: Final[tuple[ClientProgram, ...]] = PYTHON_CLIENTS
