"""`scripts/environments.py`: nothing is installed twice, clones share, and what was broken off is never used."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.environments import ENVIRONMENTS, UV, InstallationError, ensure, store

pytestmark = pytest.mark.starts

ROOT = Path(__file__).parents[2]
UV_PROGRAM = """#!/bin/sh
echo "$@" >> "$AGENTRL_VENVS/told"
echo "$UV_FIND_LINKS|$UV_INDEX|$UV_INDEX_STRATEGY" > "$AGENTRL_VENVS/settings"
case "$*" in *"$REFUSE"*) echo "no such package" >&2; exit 1;; esac
test "$1" = venv || exit 0
for folder; do :; done
mkdir -p "$folder/bin"
printf '#!/bin/sh\\nexit ${BROKEN:-0}\\n' > "$folder/bin/python"
chmod +x "$folder/bin/python"
"""


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that clones share, with a uv that only writes down what it is told."""
    folder = tmp_path / "shared"
    program = folder / f"uv-{UV}-{platform.python_version()}" / "bin" / "uv"
    program.parent.mkdir(parents=True)
    program.write_text(UV_PROGRAM)
    program.chmod(0o755)
    (program.parents[1] / ".ready").touch()
    monkeypatch.setenv("AGENTRL_VENVS", str(folder))
    return folder


def make_clone(path: Path) -> Path:
    shutil.copytree(ROOT / "scripts", path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, path)
    return path


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with what environments are made from."""
    return make_clone(tmp_path / "clone")


def installing(clone: Path, *names: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(clone / "scripts" / "environments.py"), *names]
    environment = {**os.environ, "REFUSE": "nothing at all", **variables}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def install(clone: Path, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    with installing(clone, *names, **variables) as process:
        stdout, stderr = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def told(shared: Path) -> list[str]:
    return (shared / "told").read_text().splitlines()


def test_an_environment_is_installed_once_for_all_clones(clone: Path, shared: Path, tmp_path: Path) -> None:
    first = install(clone, "sglang")
    assert first.returncode == 0, first.stderr
    assert "Installing scripts/sglang_requirements.txt into" in first.stdout
    [made, installed] = told(shared)
    assert made.startswith("venv")
    assert "--no-deps -r scripts/sglang_requirements.txt" in installed
    other = make_clone(tmp_path / "other")
    for again in (clone, other):
        done = install(again, "sglang")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert told(shared) == [made, installed]
    links = [(folder / ".sglang-venv").readlink() for folder in (clone, other)]
    assert links[0] == links[1]
    assert links[0].is_relative_to(shared)


def test_two_clones_that_install_at_once_make_one_environment(clone: Path, shared: Path, tmp_path: Path) -> None:
    others = [clone, *(make_clone(tmp_path / f"other-{number}") for number in range(2))]
    processes = [installing(folder, "envs") for folder in others]
    assert [process.wait(timeout=600) for process in processes] == [0, 0, 0]
    for process in processes:
        process.communicate()
    assert len([line for line in told(shared) if line.startswith("venv")]) == 1
    assert len({(folder / ".envs-venv").readlink() for folder in others}) == 1


def test_other_pins_are_another_environment_and_the_earlier_one_stays_for_other_clones(clone: Path) -> None:
    assert install(clone, "envs").returncode == 0
    earlier = (clone / ".envs-venv").readlink()
    pins = clone / "scripts" / "envs_requirements.txt"
    pins.write_text(pins.read_text() + "# another line\n")
    os.utime(pins, (0, 0))
    assert install(clone, "envs").returncode == 0
    assert (clone / ".envs-venv").readlink() != earlier
    assert (earlier / ".ready").exists()


def test_what_was_broken_off_is_not_used_and_starts_over(clone: Path, shared: Path) -> None:
    failed = install(clone, "sglang", REFUSE="sglang_requirements.txt")
    assert failed.returncode == 1
    assert "no such package" in failed.stderr
    assert "failed; the lines above name the package. Fix it and run make sglang again" in failed.stderr
    assert not (clone / ".sglang-venv").exists()
    [half] = shared.glob("sglang-venv-*")
    (half / "half-a-package").touch()
    assert install(clone, "sglang").returncode == 0
    assert (clone / ".sglang-venv").readlink() == half
    assert not (half / "half-a-package").exists()


def test_a_second_installation_says_that_it_waits_for_the_first(clone: Path, shared: Path) -> None:
    assert install(clone, "envs").returncode == 0
    made = (clone / ".envs-venv").readlink()
    stamp = (made / ".ready").read_text()
    (made / ".ready").unlink()
    [path] = (shared / "locks").glob("envs-venv-*")
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with installing(clone, "envs") as second:
            assert second.stderr is not None
            said = second.stderr.readline()
            (made / ".ready").write_text(stamp)
            fcntl.flock(lock, fcntl.LOCK_UN)
            stdout, _ = second.communicate(timeout=600)
    assert f"Another installation into {made} is under way; waiting up to 1800 s" in said
    assert (second.returncode, stdout) == (0, "")
    assert len(told(shared)) == 3  # uv makes the environment, installs into it and checks it, once


def test_the_clones_own_environment_stands_in_it_and_takes_up_other_pins(clone: Path, shared: Path) -> None:
    assert install(clone, "main").returncode == 0
    [_, installed] = told(shared)
    assert "-c constraints.txt torch==2.13.0 -e .[dev]" in installed
    assert not (clone / ".venv").is_symlink()
    (clone / ".venv" / "of-a-user").touch()
    settings = clone / "pyproject.toml"
    settings.write_text(settings.read_text().replace("xfail_strict", "# a comment\nxfail_strict"))
    assert install(clone, "main").stdout == "", "only what is installed counts"
    pins = clone / "constraints.txt"
    pins.write_text(pins.read_text() + "# another line\n")
    failed = install(clone, "ray", "main", REFUSE="[dev]")
    assert failed.returncode == 1
    assert (clone / ".venv" / ".ready-ray").exists()
    assert install(clone, "main").returncode == 0
    assert not (clone / ".venv" / "of-a-user").exists(), "an update that was broken off starts over"
    assert not (clone / ".venv" / ".ready-ray").exists()


def test_an_installation_of_an_earlier_version_in_the_clone_becomes_a_link(clone: Path) -> None:
    (clone / ".sglang-venv" / "bin").mkdir(parents=True)
    assert install(clone, "sglang").returncode == 0
    assert (clone / ".sglang-venv").is_symlink()


def test_uv_takes_the_indexes_of_pip(clone: Path, shared: Path) -> None:
    variables = {"PIP_FIND_LINKS": "/some/wheels /more", "PIP_EXTRA_INDEX_URL": "https://a.test/ https://b.test/"}
    assert install(clone, "envs", **variables).returncode == 0
    assert (shared / "settings").read_text() == "/some/wheels,/more|https://a.test/ https://b.test/|unsafe-best-match\n"


def test_an_sglang_that_does_not_start_says_so(clone: Path) -> None:
    broken = install(clone, "sglang", BROKEN="1")
    assert broken.returncode == 1
    assert "but does not start; the lines above say why" in broken.stderr
    assert not (clone / ".sglang-venv").exists()


def test_a_short_disk_another_python_and_a_wrong_name_are_one_message(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [sglang] = ENVIRONMENTS["sglang"]
    with pytest.raises(InstallationError, match=f"needs up to {10**12} MB of disk, .* MB are free under"):
        ensure(replace(sglang, need_mb=10**12))
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    with pytest.raises(InstallationError, match=r"tried on Python 3.11 only; .* Use make sglang PYTHON=python3.11"):
        ensure(sglang)
    assert not list(store().glob("sglang-venv-*"))
    wrong = install(clone, "sgland")
    assert (wrong.returncode, "expected names among main, external" in wrong.stderr) == (2, True)


@pytest.mark.parametrize("pins", sorted((ROOT / "scripts").glob("*_requirements.txt")), ids=lambda path: path.stem)
def test_every_package_is_pinned_once(pins: Path) -> None:
    lines = [line for line in pins.read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.\[\],-]+==[\w.+!-]+", line)] == []
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert sorted(names) == sorted(set(names))
