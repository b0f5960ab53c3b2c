"""One renderer for each model family, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.tokens.renderer import Renderer
from tests.tokens.families import FAMILIES, write_family


@pytest.fixture(scope="session")
def family_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the model directory of a family."""
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            made[name] = write_family(tmp_path_factory.mktemp("families") / name, FAMILIES[name])
        return made[name]

    return path


@pytest.fixture(scope="session")
def renderer_of(family_path: Callable[[str], Path]) -> Callable[..., Renderer]:
    """Returns the renderer of a family, with template options."""
    made: dict[tuple[str, tuple[tuple[str, Any], ...]], Renderer] = {}

    def load(name: str, **options: bool | int | str) -> Renderer:
        key = (name, tuple(sorted(options.items())))
        if key not in made:
            made[key] = Renderer.load(family_path(name), template_options=options)
        return made[key]

    return load
