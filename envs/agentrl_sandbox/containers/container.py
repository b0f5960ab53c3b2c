"""A running container: a session of the sandbox over the file system of an episode, wherever that is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from agentrl_sandbox.session import Session
from agentrl_sandbox.streaming import ProgramStream, stream_program
from agentrl_sandbox.types import Program, Result


class Container:
    """A running container; `Workbench.run` starts one.

    Args:
        session: the way to its supervisor.
        directory: of the shell and of commands.
    """

    def __init__(self, session: Session, directory: str) -> None:
        self.session, self._directory = session, directory
        self._is_new = True

    async def shell(self, command: str, *, timeout_s: float | None = None) -> Result:
        """Run lines of bash, with the directory, variables and functions of the lines before; both outputs are `stdout`."""
        if self._is_new:
            await self.session.shell(f"exec 2>&1; cd {shlex.quote(self._directory)}")
        result = await self.session.shell(command, timeout_s=timeout_s)
        self._is_new = result.state_lost
        return result

    async def execute(
        self, argv: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Result:
        """Run a command beside the shell to its end; the rest of its process group ends with it."""
        program = Program(argv=self._from_directory(argv), environment=environment or {})
        return await self.session.run(program, timeout_s=timeout_s)

    def stream(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_bytes: int | None = None,
    ) -> AbstractAsyncContextManager[ProgramStream]:
        """Run a command beside the shell, with its output as it comes.

        Args:
            argv: the command.
            environment: variables beside those of the container.
            timeout_s: seconds until it is killed; None: the `wall_s` of the limits.
            max_bytes: of output that is delivered; what comes after it is counted. None: the `output_kb` of the limits.
        """
        limits = self.session.limits
        return stream_program(
            self.session,
            self._from_directory(argv),
            environment=environment,
            timeout_s=limits.wall_s if timeout_s is None else timeout_s,
            max_bytes=limits.output_kb * 1024 if max_bytes is None else max_bytes,
        )

    async def upload(self, files: Mapping[str, bytes]) -> None:
        """Write files by their absolute paths, with the folders above them; a full disk is an OSError."""
        await self.session.write({path.removeprefix("/"): data for path, data in files.items()})

    async def download(self, path: str, *, max_bytes: int) -> bytes:
        """Return a regular file; one that is missing, larger, or reached through a link is an OSError."""
        return await self.session.read(path.removeprefix("/"), max_bytes=max_bytes)

    def _from_directory(self, argv: Sequence[str]) -> tuple[str, ...]:
        return ("/bin/sh", "-c", 'cd "$0" && exec "$@"', self._directory, *argv)
