"""The terminal agent: one tool, `bash`, over a shell that keeps its state, until the model stops calling it.

workflow: agentrl_workflows.terminal:TerminalAgent
tasks: {path: my-tasks/, format: harbor}

agentrl validate run.yaml
agentrl train run.yaml
"""

from __future__ import annotations

from typing import Any, Final

import anyio

from agentrl.client import Client, MessageLike
from agentrl.errors import ConfigError
from agentrl.sandbox import Ending, Result
from agentrl.sandbox.containers import Container
from agentrl.tools import reply_to, tool
from agentrl.types import Task
from agentrl_workflows.terminal.episode import TerminalWorkflow, Workplace

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
        max_output_chars: characters of an output that the model reads; of a longer one the beginning and the end.
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
        screen = Screen(place.container, self._max_chars, self._command_s, place.harbor.agent_timeout_s)
        bash = tool(screen.bash)
        messages: list[MessageLike] = [{"role": "system", "content": self._system}] if self._system else []
        messages.append({"role": "user", "content": task["question"]})
        finished = False
        for _ in range(self._max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=[bash.schema])
            message = completion.choices[0].message
            finished = not message.tool_calls
            if finished or screen.is_over:
                break
            messages += [message, *[await reply_to(call, [bash]) for call in message.tool_calls or []]]
        client.record(finished=finished, **screen.counts)


class Screen:
    """The shell of one episode, and what the model sees of it."""

    def __init__(self, container: Container, max_chars: int, command_s: float, agent_s: float | None) -> None:
        self._container, self._max_chars, self._command_s = container, max_chars, command_s
        self._ends_at = anyio.current_time() + agent_s if agent_s is not None else None
        self._is_dead = False
        self.counts: dict[str, float] = {"commands": 0, "timeouts": 0, "cut": 0}

    @property
    def is_over(self) -> bool:
        """Whether the task's time for the agent is up, or the container has ended at a limit."""
        return self._is_dead or (self._ends_at is not None and anyio.current_time() >= self._ends_at)

    async def bash(self, command: str) -> str:
        """Run a command and return its output.

        Args:
            command: lines of bash
        """
        left_s = self._command_s if self._ends_at is None else min(self._command_s, self._ends_at - anyio.current_time())
        if left_s <= 0 or self._is_dead:
            return "[not run: the time for this task is up]"
        result = await self._container.shell(command, timeout_s=left_s)
        self.counts["commands"] += 1
        self.counts["timeouts"] += result.ended is Ending.TIMEOUT
        self._is_dead = result.ended in (Ending.MEMORY, Ending.FILES)
        return self._shown(result, left_s)

    def _shown(self, result: Result, patience_s: float) -> str:
        text = result.stdout.decode(errors="replace").rstrip("\n")
        if len(text) > self._max_chars:
            half = self._max_chars // 2
            left_out = len(text) - 2 * half
            text = f"{text[:half]}\n[{left_out} characters left out; read less at a time]\n{text[-half:]}"
            self.counts["cut"] += 1
        notes = [text] if text else []
        if result.ended is Ending.TIMEOUT:
            notes.append(f"[interrupted after {patience_s:.3g} s]")
        elif result.ended is not Ending.EXITED:
            notes.append(f"[ended: {result.ended} limit]" if not result.state_lost else "[the shell was killed]")
        elif result.exit_status:
            notes.append(f"[exit status {result.exit_status}]")
        if result.state_lost and not self._is_dead:
            notes.append("[a new shell starts in the first directory]")
        return "\n".join(notes) or "(no output)"
