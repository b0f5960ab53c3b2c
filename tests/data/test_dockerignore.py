"""`.dockerignore` takes files out of COPY and ADD as Docker does."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.harbor.copying import MissingFileError
from agentrl_sandbox.harbor.dockerfile import read_dockerfile
from agentrl_sandbox.harbor.recipe import CopyStep, ImageRecipe

FILES = ("a.py", "b.log", "data/one.csv", "data/raw/two.csv", "data/raw/keep.csv", "lib/c.pyc", "lib/deep/d.pyc", "lib/e.py")


def recipe(folder: Path, ignored: str, *lines: str, name: str = ".dockerignore") -> ImageRecipe:
    for file in FILES:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)
    (folder / name).write_text(ignored)
    (folder / "Dockerfile").write_text("\n".join(["FROM a", *(lines or ("COPY . /w/",)), ""]))
    return read_dockerfile(folder, docker_image=None, workdir=None)


def left_out(found: ImageRecipe) -> set[str]:
    """Return which of `FILES` do not arrive."""
    arrived = {file.target.removeprefix("/w/") for file in found.files}
    return {file for file in FILES if file not in arrived}


@pytest.mark.parametrize(
    ("ignored", "gone"),
    [
        ("# *.py\n\n  b.log  \n", {"b.log"}),
        ("*.py\n", {"a.py"}),
        ("**/*.py\n", {"a.py", "lib/e.py"}),
        ("**.pyc\n", {"lib/c.pyc", "lib/deep/d.pyc"}),
        ("*/*.pyc\n", {"lib/c.pyc"}),
        ("/data\n", {"data/one.csv", "data/raw/two.csv", "data/raw/keep.csv"}),
        ("./data/raw/\n", {"data/raw/two.csv", "data/raw/keep.csv"}),
        ("data/**\n!data/raw/keep.csv\n", {"data/one.csv", "data/raw/two.csv"}),
        ("data\n!data/raw\ndata/raw/t*\n", {"data/one.csv", "data/raw/two.csv"}),
        ("!a.py\n*.py\n", {"a.py"}),
        ("?.log\nlib/[a-d].py*\n", {"b.log", "lib/c.pyc"}),
        ("lib/[^a-d].py\n", {"lib/e.py"}),
        ("lib/**/d.pyc\n", {"lib/deep/d.pyc"}),
        ("lib/**/c.pyc\n", {"lib/c.pyc"}),
        ("\\a.py\nB.LOG\n", {"a.py"}),
        ("a+py\n(b).log\n", set[str]()),
    ],
)
def test_the_last_pattern_that_fits_a_path_or_a_directory_above_it_decides(
    tmp_path: Path, ignored: str, gone: set[str]
) -> None:
    assert left_out(recipe(tmp_path, ignored)) == gone


def test_a_directory_of_which_everything_is_left_out_is_not_made(tmp_path: Path) -> None:
    [step] = recipe(tmp_path, "lib/deep\ndata/*\n!data/one.csv\n").steps
    assert isinstance(step, CopyStep)
    assert step.folders == ("/w", "/w/data", "/w/lib")


def test_the_file_that_is_named_after_the_dockerfile_goes_first(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("*\n")
    assert left_out(recipe(tmp_path, "b.log\n", name="Dockerfile.dockerignore")) == {"b.log"}


def test_a_source_that_is_left_out_is_no_file_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"Dockerfile:2: COPY: 'data' is left out by \.dockerignore"):
        recipe(tmp_path, "data\n", "COPY data /w/data")
    found = recipe(tmp_path, "b.*\n", "COPY *.* /w/")
    assert left_out(found) >= {"b.log"}
    assert "/w/a.py" in {file.target for file in found.files}


def test_a_pattern_that_is_none_and_a_link_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.dockerignore:2: expected a pattern behind '!', got none"):
        recipe(tmp_path / "a", "x\n!\n")
    with pytest.raises(ConfigError, match=r"\.dockerignore:1: expected a pattern, got '\[z-a\]'"):
        recipe(tmp_path / "b", "[z-a]\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".dockerignore").symlink_to("/etc/hostname")
    (tmp_path / "c" / "Dockerfile").write_text("FROM a\nCOPY . /w/\n")
    with pytest.raises(ConfigError, match="is a link, and leads to /etc/hostname"):
        read_dockerfile(tmp_path / "c", docker_image=None, workdir=None)
