"""The images that a run file names for an engine: those that no task needs may lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS, MissingImage
from agentrl_sandbox.containers.services.copied import CopiedContainers
from agentrl_sandbox.containers.services.docker_service import DockerService

pytestmark = [pytest.mark.anyio]
ENGINE = """#!/bin/sh
case "$*" in *gone*) echo "no such image" >&2; exit 1;; esac
"""


@pytest.fixture
def service(tmp_path: Path) -> DockerService:
    """An engine that has every image but `gone:1`."""
    command = tmp_path / "engine"
    command.write_text(ENGINE)
    command.chmod(0o755)
    return DockerService("docker", (str(command),))


@pytest.mark.starts
async def test_an_image_that_an_engine_lacks_is_a_warning_and_an_error_once_it_is_needed(
    service: DockerService, caplog: pytest.LogCaptureFixture
) -> None:
    missing = await service.missing(["gone:1", "here:1"])
    assert list(missing) == ["gone:1"]
    assert "no such image; pull it: `docker pull gone:1`; tasks that need it fail" in caplog.text
    images = {"debian:12": "gone:1", "python:3": "here:1"}
    containers = CopiedContainers(service, images, default="base", missing=missing, limits=CONTAINER_LIMITS)
    for image in ("python:3", None, "other"):
        async with containers.workbench(image=image):
            pass
    with pytest.raises(MissingImage, match="docker pull gone:1"):
        async with containers.workbench(image="debian:12"):
            pass
    with pytest.raises(ConfigError, match="docker pull gone:1"):
        await service.check("gone:1")
