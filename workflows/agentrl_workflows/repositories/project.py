"""A project while an agent works on it: its files, and the tools that list, read, edit and test them.

Invariant: the files are data of this process. What a run of the tests does to its copy is gone afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.client.tools import Tool, ToolError, tool
from agentrl_rewards.code.grader import ProgramRunner
from agentrl_sandbox import Program, WorkspaceSnapshot, diff_snapshots
from agentrl_workflows.repositories.tasks import Edit
from agentrl_workflows.sandboxed import output_for_model


class Project:
    """The files of one episode, and the tools that work on them."""

    def __init__(
        self, files: Mapping[str, str], sandbox: ProgramRunner, test_command: tuple[str, ...], max_chars: int
    ) -> None:
        self.files = dict(files)
        self.submitted = False
        self._num_edits = self._num_test_runs = 0
        self._sandbox, self._test_command, self._max_chars = sandbox, test_command, max_chars

    def tools(self) -> list[Tool[..., object]]:
        """Return the tools of this episode."""
        read = [tool(self.list_files), tool(self.read_file)]
        return [*read, tool(self.edit_file), tool(self.run_tests), tool(self.submit)]

    def metrics(self, before: Mapping[str, str]) -> dict[str, float]:
        """Return what was done to the project."""
        diff = diff_snapshots(*(WorkspaceSnapshot(files=files_as_bytes(files)) for files in (before, self.files)))
        changed = len(diff.added) + len(diff.changed)
        counts = {"edits": self._num_edits, "test_runs": self._num_test_runs, "changed_files": changed}
        return {"submitted": float(self.submitted)} | {name: float(count) for name, count in counts.items()}

    async def list_files(self) -> str:
        """List the files of the project."""
        return "\n".join(sorted(self.files))

    async def read_file(self, path: str) -> str:
        """Return the text of a file."""
        if path not in self.files:
            raise ToolError(f"there is no file {path[:200]!r}; call list_files")
        return self.files[path][: self._max_chars]

    async def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace text in a file.

        Args:
            path: of the file
            old: the text to replace, which must be in the file exactly once; empty to make a new file
            new: the text in its place
        """
        try:
            self.files = Edit(path=path, old=old, new=new).applied(self.files)
        except ValueError as error:
            raise ToolError(str(error)) from None
        self._num_edits += 1
        return "done"

    async def run_tests(self) -> str:
        """Run the project's own tests and return their output."""
        self._num_test_runs += 1
        result = await self._sandbox.run(Program(argv=self._test_command, files=files_as_bytes(self.files)))
        return output_for_model(result, self._max_chars)

    async def submit(self) -> str:
        """End the work on the issue."""
        self.submitted = True
        return "submitted"


def files_as_bytes(files: Mapping[str, str]) -> dict[str, bytes]:
    """Return the files of a project as a sandbox takes them."""
    return {path: text.encode(errors="surrogatepass") for path, text in files.items()}
