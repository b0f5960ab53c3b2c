"""A sandbox that does not hold is refused before it runs anything, with the reason and the fix."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from agentrl.errors import ConfigError
from agentrl_sandbox.bubblewrap import open_bubblewrap
from agentrl_sandbox.bubblewrap.host import Host, find_host
from agentrl_sandbox.bubblewrap.selftest import advice

WEAK = Path(__file__).parents[1] / "support" / "weak_bwrap.py"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may read, unlike pytest's own."""
    with TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("wall", "said"),
    [
        ("network", "programs reach the network"),
        ("files", "programs see the machine's files"),
        ("filter", "the system call filter does not apply"),
        ("readonly", "programs can write in"),
        ("sizes", "the temporary directories are not limited in size"),
        ("environment", "programs see the environment: HF_TOKEN"),
        ("cmdline", "programs read the kernel's command line"),
    ],
)
async def test_a_missing_wall_is_named(host: Host, folder: Path, wall: str, said: str) -> None:
    weak = executable(folder / f"bwrap-{wall}", WEAK.read_text().replace("/usr/bin/bwrap", host.bwrap))
    with pytest.raises(ConfigError, match=f"does not isolate on this machine: {said}"):
        await open_bubblewrap(bwrap=weak)


@pytest.mark.starts
async def test_a_bubblewrap_that_isolates_nothing_is_refused(host: Host, folder: Path) -> None:
    weak = executable(folder / "bwrap-everything", WEAK.read_text().replace("/usr/bin/bwrap", host.bwrap))
    with pytest.raises(ConfigError, match="sandbox"):
        await open_bubblewrap(bwrap=weak)


@pytest.mark.starts
async def test_a_kernel_without_user_namespaces_is_named(host: Host, folder: Path) -> None:
    del host
    said = "bwrap: No permissions to create new namespace"
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo bubblewrap 0.8.0 && exit 0\necho "{said}" >&2\nexit 1\n'
    with pytest.raises(ConfigError, match=rf"{said}.*docker or remote backend"):
        await open_bubblewrap(bwrap=executable(folder / "bwrap", script))


def test_each_setting_that_blocks_namespaces_has_its_fix(tmp_path: Path) -> None:
    settings = {
        "sys/user/max_user_namespaces": ("0", "user.max_user_namespaces=15000"),
        "sys/kernel/unprivileged_userns_clone": ("0", "kernel.unprivileged_userns_clone=1"),
        "sys/kernel/apparmor_restrict_unprivileged_userns": ("1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    }
    for name, (value, fix) in settings.items():
        shutil.rmtree(tmp_path / "sys", ignore_errors=True)
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(value + "\n")
        assert f"run `sysctl -w {fix}`" in advice(tmp_path)
    shutil.rmtree(tmp_path / "sys")
    assert "--security-opt" in advice(tmp_path)


def test_a_missing_bubblewrap_is_refused_with_the_way_to_install_it() -> None:
    with pytest.raises(ConfigError, match=r"cannot find /nowhere/bwrap; install bubblewrap 0.8"):
        find_host(bwrap="/nowhere/bwrap")


@pytest.mark.starts
def test_a_bubblewrap_that_is_too_old_is_refused(folder: Path) -> None:
    script = executable(folder / "bwrap", "#!/bin/sh\necho bubblewrap 0.4.1\n")
    with pytest.raises(ConfigError, match=r"is bubblewrap 0\.4\.1, 0\.8\.0 is the oldest that works"):
        find_host(bwrap=script)


@pytest.mark.starts
def test_a_python_outside_of_what_is_shown_is_refused(host: Host, folder: Path) -> None:
    del host
    python = executable(folder / "python3", "#!/bin/sh\n")
    with pytest.raises(ConfigError, match=r"is not in /usr; add its tree to `readable`"):
        find_host(python=python)
    with pytest.raises(ConfigError, match="expected an absolute path that exists"):
        find_host(readable=["relative"])
