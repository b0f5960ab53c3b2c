"""What the image of a task has to hold, looked for before the first episode over that image."""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio

from agentrl.errors import ConfigError, RunStopped
from agentrl.support.concurrency import outside_work
from agentrl_sandbox.containers import Containers
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import Limits
from agentrl_workflows.terminal.opening_errors import opening_error

_LOOK_S = 120.0


class ImageNeeds:
    """Looks once into each image for what tasks name in `[metadata.agentrl.needs]`."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers
        self._turns: dict[tuple[str | None, tuple[str, ...]], anyio.Lock] = {}
        self._seen: set[tuple[str | None, tuple[str, ...]]] = set()

    async def check(self, harbor: HarborTask, limits: Limits) -> None:
        """Return where the image of a task has what the task needs.

        Raises:
            RunStopped: it lacks something, so that no episode over it could be judged, or `images` names what is not there.
            EnvironmentFault: there is no such image, or no container of it starts.
        """
        needs, image = harbor.needs, harbor.image.image
        if not needs:
            return
        key = (image, tuple(needs.values()))
        with outside_work():
            async with self._turns.setdefault(key, anyio.Lock()):
                if key in self._seen:
                    return
                missing = await self._missing(harbor, limits)
                self._seen.add(key)
        if missing:
            where = "the image of tasks that name none" if image is None else f"the image {image!r}"
            where = f"the image of {built}" if (built := harbor.image.built_from) else where
            raise RunStopped(
                f"{where} lacks {', '.join(missing)}, which {harbor.folder} needs; choose an image that has it, or put it "
                "there (docs/howto/terminal.md, Images)"
            )

    async def _missing(self, harbor: HarborTask, limits: Limits) -> list[str]:
        try:
            async with AsyncExitStack() as stack:
                workbench = self._containers.workbench(image=harbor.image.image, limits=limits)
                bench = await stack.enter_async_context(workbench)
                container = await stack.enter_async_context(bench.run(environment=harbor.image.env))
                found = [
                    (need, await container.execute(["/bin/sh", "-c", command], timeout_s=_LOOK_S))
                    for need, command in harbor.needs.items()
                ]
        except ConfigError as error:
            raise opening_error(harbor, error) from error
        return [need for need, result in found if not result.is_success]
