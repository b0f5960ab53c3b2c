"""The lines that `agentrl doctor` prints.

Invariant: each check prints one line, `ok`, or `FIX` with what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from agentrl.errors import AgentRLError
from agentrl.foreign import visible
from agentrl.jobs.errors import describe_error

_Result = TypeVar("_Result")


@dataclass(slots=True)
class CheckReport:
    """Prints each check and counts the failed ones."""

    console: Console = field(default_factory=Console)
    num_failed: int = 0

    def ok(self, name: str, detail: str) -> None:
        """Print a check that passed."""
        self._line("ok", "green", name, detail)

    def fix(self, name: str, detail: str) -> None:
        """Print a check that failed, and what to do."""
        self.num_failed += 1
        self._line("FIX", "red", name, detail)

    def check(self, name: str, probe: Callable[[], _Result], describe: Callable[[_Result], str]) -> _Result | None:
        """Run `probe` and print its result, or what to fix if it raises an error of agentrl; return None then."""
        try:
            found = probe()
        except (AgentRLError, BaseExceptionGroup) as error:
            self.fix(name, describe_error(error))
            return None
        self.ok(name, describe(found))
        return found

    def _line(self, mark: str, style: str, name: str, detail: str) -> None:
        self.console.print(Text.assemble((f"{mark:<4}", style), f"{name:<12} {visible(detail)}"), soft_wrap=True)
