"""What a model sees of a shell in a container: outputs within a budget for each turn, and a word on what was cut."""

from __future__ import annotations

import anyio

from agentrl_sandbox import Ending, Result
from agentrl_sandbox.containers import Container


class Screen:
    """The shell of one episode, as text.

    Args:
        container: of the agent.
        max_chars: characters of outputs that one turn may add, whatever the number of its commands; of a longer output the
            beginning and the end are left, and the text says how much is gone.
        command_s: seconds after which a command is interrupted.
        agent_s: seconds from now that the task gives its agent; None: it does not say.
    """

    def __init__(
        self, container: Container, *, max_chars: int = 8_000, command_s: float = 60.0, agent_s: float | None = None
    ) -> None:
        self._container, self._max_chars, self._command_s = container, max_chars, command_s
        self._ends_at = anyio.current_time() + agent_s if agent_s is not None else None
        self._is_dead = False
        self._left = max_chars
        self.counts: dict[str, float] = {"commands": 0, "timeouts": 0, "cut": 0}
        """What happened so far, for `client.record`."""

    @property
    def is_over(self) -> bool:
        """Whether the task's time for the agent is up, or the container has ended at a limit."""
        return self._is_dead or (self._ends_at is not None and anyio.current_time() >= self._ends_at)

    def begin_turn(self) -> None:
        """Give the commands that follow the whole budget of a turn."""
        self._left = self._max_chars

    def extend(self, seconds: float) -> None:
        """Give the agent back time that it did not use itself."""
        if self._ends_at is not None:
            self._ends_at += seconds

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
        whole = result.stdout.decode(errors="replace").rstrip("\n")
        text = cut_text(whole, self._left)
        self.counts["cut"] += len(whole) > self._left
        self._left -= min(len(whole), self._left)
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


def cut_text(text: str, max_chars: int) -> str:
    r"""Return the beginning and the end of a text that is too long, with a line between them that says so.

    Example:
        >>> cut_text("0123456789", 4)
        '01\n[6 characters left out; read less at a time]\n89'
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    said = f"[{len(text) - 2 * half} characters left out; read less at a time]"
    return "\n".join(part for part in (text[:half], said, text[-half:] if half else "") if part)
