"""The tokenizer that workers load."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from agentrl.tokens.renderer import Renderer
from agentrl_workflows.demo.ray_nodes import LocalRayCluster, ray_cluster
from tests.rollout.harness import make_renderer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("remote-model")
    make_renderer(folder)
    return folder


@pytest.fixture(scope="session")
def renderer(model: Path) -> Renderer:
    """The tokenizer in this process."""
    return Renderer.load(model)


@pytest.fixture(scope="session")
def cluster() -> Generator[LocalRayCluster]:
    """A Ray cluster of three nodes on this machine."""
    pytest.importorskip("ray")
    with ray_cluster() as cluster:
        yield cluster
