"""What users install: the core, its companions and nothing else, light to depend on."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    [built] = folder.glob("*.whl")
    return built


@pytest.mark.starts
def test_the_wheel_installs_the_core_and_its_companions(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {
        "agentrl",
        *(
            f"agentrl_{name}"
            for name in ("doors", "envs", "gguf", "rewards", "sandbox", "simulate", "testing", "viewer", "workflows")
        ),
    }


@pytest.mark.starts
def test_the_wheel_is_typed(wheel: Path) -> None:
    assert "agentrl/py.typed" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.starts
def test_the_wheel_has_what_launches_sglang(wheel: Path) -> None:
    assert "agentrl/inference/launch/sglang_main.py" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.starts
def test_the_wheel_has_the_page_of_the_viewer(wheel: Path) -> None:
    names = {file.name for file in (ROOT / "companions" / "agentrl_viewer" / "view" / "page").iterdir()}
    assert {f"agentrl_viewer/view/page/{name}" for name in names} <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.starts
def test_the_wheel_has_the_templates_of_new_projects(wheel: Path) -> None:
    root = ROOT / "agentrl" / "commands" / "templates"
    names = {str(file.relative_to(ROOT)) for file in root.rglob("*.template")}
    assert len(names) > 5
    assert names <= set(zipfile.ZipFile(wheel).namelist())


def test_base_dependencies_do_not_name_ray_or_sglang() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [name for name in project["dependencies"] if name.startswith(("ray", "sglang"))]
