"""Workbenches with the environment of a task: its files, and what the commands of its image made.

Invariant: the commands of an image run once for all episodes of a task, with their feedback and their tests, while the
layers that they made are kept (`PreparedLayers`). Tasks whose Dockerfiles begin alike share the layers of the beginning.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncGenerator, Collection, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread

from agentrl.errors import ConfigError, EnvironmentFault, RunStopped
from agentrl_sandbox import Ending
from agentrl_sandbox.containers import Container, Containers, Workbench
from agentrl_sandbox.containers.image_facts import FactsOf
from agentrl_sandbox.containers.prepared import PREPARE_S, Begun, PreparedLayers
from agentrl_sandbox.containers.protocol import BenchRole, BuildsImages, MissingImage
from agentrl_sandbox.harbor.recipe import ImageRecipe
from agentrl_sandbox.harbor.task import HarborTask, read_harbor_folder
from agentrl_sandbox.types import Limits
from agentrl_workflows.terminal.image_needs import ImageNeeds
from agentrl_workflows.terminal.image_steps import (
    FoundPlace,
    StepGroup,
    files_of,
    groups_of,
    layer_keys,
    look_up,
    paths_to_look_up,
    run_steps,
)
from agentrl_workflows.terminal.opening_errors import opening_error


class TaskBenches:
    """Opens the workbenches of tasks.

    Args:
        containers: where they are.
        prepare_s: seconds that the commands of one image have together.
        has_packages: images that hold what the commands of Dockerfiles over them fetch from a network.
        facts_of: knows what images say of themselves, where no engine builds any.
        by_engine: whether the containers are those of an engine that builds the images of tasks.
    """

    def __init__(
        self,
        containers: Containers,
        *,
        prepare_s: float = PREPARE_S,
        has_packages: Collection[str] = (),
        facts_of: FactsOf | None = None,
        by_engine: bool = False,
    ) -> None:
        self._facts_of, self._by_engine = facts_of, by_engine
        self._containers, self._prepared = containers, PreparedLayers(prepare_s=prepare_s)
        self._has_packages = frozenset(has_packages)
        self._needs = ImageNeeds(containers)
        self._found: dict[tuple[str, ...], dict[str, FoundPlace]] = {}
        """Where paths lead over the layers of a name, which comes first in the key."""

    async def task_in(self, folder: Path) -> HarborTask:
        """Return the task in a folder; where an engine builds images, with those that it has built.

        Raises:
            ConfigError: the folder cannot be read.
            EnvironmentFault: an image cannot be built.
            RunStopped: `images` names an image that is not there.
        """
        if not self._by_engine:
            return read_harbor_folder(folder, self._facts_of)
        if not isinstance(self._containers, BuildsImages):
            raise ConfigError(f"containers: {self._containers.name} builds no images; take docker or podman")
        try:
            from agentrl_sandbox.harbor.built import read_built_task

            return await read_built_task(folder, self._containers)
        except MissingImage as error:
            raise RunStopped(f"{folder}: {error}; correct its entry in `images`") from error

    @asynccontextmanager
    async def opened(self, harbor: HarborTask, limits: Limits, role: BenchRole = "alone") -> AsyncGenerator[Workbench]:
        """Open a workbench with the environment of a task. Nothing is left at the block's end.

        Raises:
            EnvironmentFault: there is no such image, it cannot be opened, or a command of the image fails.
            RunStopped: `images` names the image and it is not there, it lacks what the task needs, or nothing holds the
                second environment of its feedback.
        """
        await self._needs.check(harbor, limits)
        async with AsyncExitStack() as stack:
            workbench = self._containers.workbench(image=harbor.image.image, limits=limits, role=role)
            try:
                recipe = harbor.image.settled(self._has_packages)
                bench = await stack.enter_async_context(workbench)
            except ConfigError as error:
                raise opening_error(harbor, error) from error
            await self._carry_out(recipe, bench, harbor, limits)
            yield bench

    async def _carry_out(self, recipe: ImageRecipe, bench: Workbench, harbor: HarborTask, limits: Limits) -> None:
        """Give a new workbench the layers of a recipe; those that were made before are taken over."""
        groups, begun, below = groups_of(recipe), Begun(0, 0.0), repr(recipe.image)
        keys = await anyio.to_thread.run_sync(layer_keys, recipe, groups) if groups[0].runs else [""]
        for group, key in zip(groups, keys, strict=True):
            prepare = partial(self._prepare, group=group, below=below, harbor=harbor, limits=limits)
            if group.runs:
                begun = await self._prepared.begin(key, bench, prepare, begun=begun, label=str(harbor.folder))
            else:
                await prepare(bench)
            below = key

    async def _prepare(self, bench: Workbench, group: StepGroup, below: str, harbor: HarborTask, limits: Limits) -> None:
        """Put the files of a group into a workbench, and run its commands; `below` names the layers that it has."""
        paths = paths_to_look_up(group.copies)
        asked = (below, *paths)
        if paths and asked not in self._found:
            async with bench.run(limits=limits) as container:
                self._found[asked] = await look_up(container, paths)
        if group.copies:
            await bench.add(await anyio.to_thread.run_sync(files_of, group.copies, self._found.get(asked, {})))
        if group.runs:
            async with bench.run(limits=limits) as container:
                await run_steps(container, group.runs, harbor.build_timeout_s)


@contextmanager
def limits_as_full_disks(container: Container) -> Generator[None]:
    """Raise an OSError where a limit of memory or files has ended the container, as where its disk is full."""
    try:
        yield
    except EnvironmentFault as fault:
        if container.session.supervisor.ending not in (Ending.MEMORY, Ending.FILES):
            raise
        raise OSError(errno.ENOMEM, str(fault)) from fault
