"""The image installs what the repository has."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def test_every_file_that_the_image_copies_exists_and_the_package_is_among_them() -> None:
    copied = [name for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {name.partition("/")[0] for name in built} <= set(copied)


def test_the_image_installs_extras_that_exist() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [asked] = re.findall(r"^ARG EXTRAS=(.+)$", DOCKERFILE, re.MULTILINE)
    assert set(asked.split(",")) <= known.keys()


@pytest.mark.starts
def test_the_installation_without_a_place_says_how_to_call_it() -> None:
    done = subprocess.run(["bash", ROOT / "docker" / "install.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "usage: docker/install.sh PREFIX" in done.stderr
