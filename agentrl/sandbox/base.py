"""The interface of a sandbox, whatever isolates it.

Invariant: a sandbox runs anything a model wrote. What the program does is in the `Result`; what the sandbox fails to do is
an `EnvironmentFault`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from agentrl.errors import ConfigError
from agentrl.sandbox.box import Starter, open_forks, open_session, run_in_box
from agentrl.sandbox.session import Session
from agentrl.sandbox.types import Limits, Program, Result, check_files
from agentrl.sandbox.usage_record import note_use


class Sandbox(Protocol):
    """Runs programs, each in a new sandbox. Calls without limits have those that the sandbox was made with."""

    @property
    def name(self) -> str:
        """The backend, such as `bubblewrap`."""
        ...

    @property
    def is_isolated(self) -> bool:
        """Whether programs are kept from this machine; False for the backend whose name says unsafe."""
        ...

    @property
    def limits(self) -> Limits:
        """Those of calls that bring none."""
        ...

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `program` to its end or to a limit, and leave nothing of it behind, also when it is cancelled.

        Raises:
            EnvironmentFault: the sandbox could not do its part.
        """
        ...

    def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Open a sandbox for many calls, with a Python, a shell and a working directory that keep their state.

        Args:
            files: first contents of the working directory.
            limits: of the session, and of each call.

        Raises:
            ConfigError: a path leaves the working directory.
            EnvironmentFault: the sandbox could not be started.
        """
        ...

    def forks(self, *, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a sandbox with a warm Python; `Session.run_python` forks it, each time behind walls of the program's own.

        Raises:
            ConfigError: this backend has no walls between the programs of one sandbox.
            EnvironmentFault: the sandbox could not be started.
        """
        ...


class BoxSandbox:
    """A sandbox on this machine; its starter isolates the programs.

    Args:
        name: of the backend.
        starter: of the boxes.
        supervisor: Python and the path of the supervisor of sessions, as the boxes see them.
        is_isolated: whether programs are kept from this machine.
        limits: of calls that bring none.
        forks: Python and the path of `inside/programs.py`; None: the backend cannot part the programs of one sandbox.
    """

    def __init__(
        self,
        name: str,
        starter: Starter,
        supervisor: tuple[str, ...],
        *,
        is_isolated: bool,
        limits: Limits | None = None,
        forks: tuple[str, ...] | None = None,
    ) -> None:
        self.name, self.is_isolated, self.limits = name, is_isolated, limits or Limits()
        self._starter, self._supervisor, self._forks = starter, supervisor, forks

    async def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run `program` as `Sandbox.run` describes."""
        note_use(self.name, is_isolated=self.is_isolated)
        return await run_in_box(self._starter, program, limits or self.limits)

    def session(
        self, *, files: Mapping[str, bytes] | None = None, limits: Limits | None = None
    ) -> AbstractAsyncContextManager[Session]:
        """Open a session as `Sandbox.session` describes."""
        check_files(files or {})
        note_use(self.name, is_isolated=self.is_isolated)
        return open_session(self._starter, self._supervisor, limits or self.limits, files)

    def forks(self, *, limits: Limits | None = None) -> AbstractAsyncContextManager[Session]:
        """Open a warm Python as `Sandbox.forks` describes."""
        if self._forks is None:
            raise ConfigError(
                f"sandbox: the backend {self.name} cannot keep the programs of one warm interpreter apart; use the backend "
                "bubblewrap, or start each program in a sandbox of its own (`start: cold`)"
            )
        note_use(self.name, is_isolated=self.is_isolated)
        return open_forks(self._starter, self._forks, limits or self.limits)
