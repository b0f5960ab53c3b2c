"""The terminal agent: one tool, `bash`, over a shell that keeps its state, until the model stops calling it.

workflow: agentrl_workflows.terminal:TerminalAgent
tasks: {path: my-tasks/, format: harbor}

agentrl validate run.yaml
agentrl train run.yaml
"""

from __future__ import annotations

from typing import Any, Final

from agentrl.client import Client
from agentrl.client.tools import reply_to, tool
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_workflows.terminal.episode import TerminalWorkflow
from agentrl_workflows.terminal.screen import Screen
from agentrl_workflows.terminal.workplace import Workplace

TERMINAL_SYSTEM: Final = (
    "You work in a terminal. Call `bash` with the command to run; its directory and variables stay as you leave them. "
    "When the task is done, answer without a call. What the files and services are then is what counts."
)


class TerminalAgent(TerminalWorkflow):
    """Lets the model run commands in the container of its task; pays what the task's own tests say.

    Records `commands`, `timeouts` (commands that reached `command_s`), `cut` (outputs that were too long), `finished` (0: a
    limit ended the work), and what `TerminalWorkflow` records.

    Args:
        max_turns: model calls of one episode.
        command_s: seconds after which a command is interrupted; the model reads that it was.
        max_output_chars: characters of outputs that one turn adds at most; of a longer one the beginning and the end.
        system: the system message; empty: none.
        **settings: those of `TerminalWorkflow`.
    """

    def __init__(
        self,
        *,
        max_turns: int = 30,
        command_s: float = 60.0,
        max_output_chars: int = 8_000,
        system: str = TERMINAL_SYSTEM,
        **settings: Any,  # noqa: ANN401 - those of the base class, which checks them
    ) -> None:
        if max_turns < 1 or command_s <= 0 or max_output_chars < 2:
            raise ConfigError(
                f"max_turns, command_s and max_output_chars must be positive, got {max_turns}, {command_s} and "
                f"{max_output_chars}"
            )
        super().__init__(**settings)
        self._max_turns, self._command_s, self._max_chars, self._system = max_turns, command_s, max_output_chars, system

    async def work(self, task: Task, client: Client, place: Workplace) -> None:
        """Let the model work until it answers without a call, or reaches a limit."""
        agent_s = place.harbor.agent_timeout_s
        screen = Screen(place.container, max_chars=self._max_chars, command_s=self._command_s, agent_s=agent_s)
        bash = tool(screen.bash)
        messages = place.conversation
        if self._system and not messages:
            messages.append({"role": "system", "content": self._system})
        messages.append({"role": "user", "content": task["question"]})
        finished = False
        for _ in range(self._max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=[bash.schema])
            message = completion.choices[0].message
            finished = not message.tool_calls
            if finished:
                messages.append(message)
            if finished or screen.is_over:
                break
            screen.begin_turn()
            messages += [message, *[await reply_to(call, [bash]) for call in message.tool_calls or []]]
            if not screen.is_over:
                screen.extend(await place.feedback.give(client))
        client.record(finished=finished, **screen.counts, **place.feedback.counts)
