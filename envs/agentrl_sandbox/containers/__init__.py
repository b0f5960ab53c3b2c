r"""Containers without a daemon: a root file system, layers over it in memory, and bubblewrap around its processes.

Example:
    async with open_containers() as containers, containers.workbench() as bench:
        await bench.add({"/app/notes.txt": b"hello"})
        async with bench.run(directory="/app") as container:
            await container.shell("echo 42 > answer.txt")
        assert await bench.read("/app/answer.txt") == b"42\n"
"""

from __future__ import annotations

from agentrl_sandbox.containers.container import Container
from agentrl_sandbox.containers.protocol import Containers, LayerFile, Workbench
from agentrl_sandbox.containers.workbench import BubblewrapContainers, open_containers

__all__ = ["BubblewrapContainers", "Container", "Containers", "LayerFile", "Workbench", "open_containers"]
