"""A Ray cluster for the tests marked `ray`."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from agentrl_workflows.demo.ray_nodes import LocalRayCluster, ray_cluster


@pytest.fixture(scope="session")
def cluster() -> Generator[LocalRayCluster]:
    pytest.importorskip("ray")
    with ray_cluster() as cluster:
        yield cluster
