"""The engines of this folder's tests: real ones, each of which starts once for a session and ends with all it holds."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.support.container_engines import Engine, running_docker, running_podman


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def docker_engine() -> Generator[Engine]:
    """A dockerd of this test session."""
    with running_docker() as engine:
        yield engine


@pytest.fixture(scope="session")
def podman_engine() -> Generator[Engine]:
    """A podman of this test session."""
    with running_podman() as engine:
        yield engine


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    found: Engine = request.getfixturevalue(f"{request.param}_engine")
    return found
