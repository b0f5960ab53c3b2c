"""Workbenches with the environment of a task: its files, and what the commands of its image made.

Invariant: the commands of an image run once for all episodes of a task, with their feedback and their tests, while the
layers that they made are kept (`PreparedLayers`).
"""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Final

from agentrl.errors import ConfigError, EnvironmentFault
from agentrl_sandbox import Ending
from agentrl_sandbox.containers import Container, Containers, LayerFile, Workbench
from agentrl_sandbox.containers.prepared import PREPARE_S, PreparedLayers
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import Limits, Result
from agentrl_workflows.terminal.image_needs import ImageNeeds

_LAST_CHARS: Final = 600


class TaskBenches:
    """Opens the workbenches of tasks.

    Args:
        containers: where they are.
        prepare_s: seconds that the commands of one image have together.
    """

    def __init__(self, containers: Containers, *, prepare_s: float = PREPARE_S) -> None:
        self._containers, self._prepared = containers, PreparedLayers(prepare_s=prepare_s)
        self._needs = ImageNeeds(containers)

    @asynccontextmanager
    async def opened(self, harbor: HarborTask, limits: Limits) -> AsyncGenerator[Workbench]:
        """Open a workbench with the environment of a task. Nothing is left at the block's end.

        Raises:
            EnvironmentFault: there is no such image, it cannot be opened, or a command of the image fails.
            RunStopped: the image lacks what the task needs.
        """
        await self._needs.check(harbor, limits)
        async with AsyncExitStack() as stack:
            workbench = self._containers.workbench(image=harbor.image.image, limits=limits)
            try:
                bench = await stack.enter_async_context(workbench)
            except ConfigError as error:
                raise EnvironmentFault(f"{harbor.folder}: {error}") from error
            prepare = partial(_prepare, harbor=harbor, limits=limits)
            if harbor.image.commands:
                await self._prepared.begin(str(harbor.folder), bench, prepare)
            else:
                await prepare(bench)
            yield bench


async def _prepare(bench: Workbench, harbor: HarborTask, limits: Limits) -> None:
    """Put the files of a task into a new workbench, and run the commands of its image."""
    files: dict[str, LayerFile] = {}
    folder = harbor.folder / "environment"
    for source, target in harbor.image.copies:
        path = folder / source
        if path.is_file():
            files[target] = path
        else:
            found = (each for each in sorted(path.rglob("*")) if each.is_file())
            files |= {f"{target}/{each.relative_to(path)}".replace("//", "/"): each for each in found}
    files[f"{harbor.image.workdir}/"] = b""
    await bench.add(files)
    if not harbor.image.commands:
        return
    async with bench.run(environment={**harbor.image.env, **harbor.agent_env}, limits=limits) as container:
        for directory, command in harbor.image.commands:
            line = f"mkdir -p '{directory}' && cd '{directory}' && {command}"
            result = await container.execute(["/bin/bash", "-c", line], timeout_s=harbor.build_timeout_s)
            if not result.is_success:
                raise EnvironmentFault(f"{folder}/Dockerfile: RUN {command}: {end_of_output(result)}")


def end_of_output(result: Result) -> str:
    """Return the last words of a program, for a message."""
    return result.text[-_LAST_CHARS:] or "(nothing)"


@contextmanager
def limits_as_full_disks(container: Container) -> Generator[None]:
    """Raise an OSError where a limit of memory or files has ended the container, as where its disk is full."""
    try:
        yield
    except EnvironmentFault as fault:
        if container.session.supervisor.ending not in (Ending.MEMORY, Ending.FILES):
            raise
        raise OSError(errno.ENOMEM, str(fault)) from fault
