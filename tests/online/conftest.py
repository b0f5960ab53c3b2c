"""Fixtures of the tests of online runs."""

from __future__ import annotations

import pytest

from agentrl.tokens.renderer import Renderer
from tests.rollout.harness import make_renderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """A tiny tokenizer with a chat template."""
    return make_renderer(tmp_path_factory.mktemp("renderer"))
