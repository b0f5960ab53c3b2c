"""Task folders of Harbor: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh` and `solution/solve.sh`.

Schema versions 1.0 to 1.4. A setting that agentrl does not honour is a `ConfigError` that names its field, when the task
loads.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_sandbox.harbor.dockerfile import ImageRecipe, read_dockerfile, refuse_links_out

HARBOR_FILE: Final = "task.toml"
_VERSIONS: Final = ("1.0", "1.1", "1.2", "1.3", "1.4")
_TEMPLATE: Final = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}")
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])", re.IGNORECASE)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NETWORK_MODES: Final = ("no-network", "public")
_UNIT_MB: Final = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


class _Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory: str | None = None
    memory_mb: int | None = None
    storage: str | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None
    network_mode: str = "public"
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None


class _Agent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class _Verifier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[dict[str, Any]] = []


class _Solution(msgspec.Struct, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: str | None = None
    schema_version: str | None = None
    metadata: dict[str, Any] = {}
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()
    steps: list[dict[str, Any]] = []


class HarborTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task folder, read and checked."""

    folder: Path
    instruction: str
    metadata: dict[str, Any]
    image: ImageRecipe
    agent_timeout_s: float | None
    verifier_timeout_s: float
    build_timeout_s: float
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    agent_env: dict[str, str]
    """Variables of the environment, which agent and verifier see."""
    verifier_env: dict[str, str]
    """Variables of `tests/test.sh` alone."""
    solution_env: dict[str, str]
    """Variables of `solution/solve.sh` alone."""

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def kept(self) -> tuple[str, ...]:
        """Paths beside the default ones that the verifier takes over from the agent: `[metadata.agentrl] keep`."""
        own = self.metadata.get("agentrl")
        kept: object = cast("Mapping[str, Any]", own).get("keep", []) if isinstance(own, Mapping) else []
        if not isinstance(kept, list) or not all(isinstance(each, str) and each.startswith("/") for each in kept):
            raise _field_error(self.folder, "metadata.agentrl.keep", f"expected a list of absolute paths, got {kept!r}")
        return tuple(cast("list[str]", kept))

    @property
    def needs(self) -> dict[str, str]:
        """What the image has to hold, and the shell command that succeeds where it does: `[metadata.agentrl.needs]`."""
        own = self.metadata.get("agentrl")
        needs: object = cast("Mapping[str, Any]", own).get("needs", {}) if isinstance(own, Mapping) else {}
        if not isinstance(needs, Mapping) or not all(isinstance(command, str) for command in needs.values()):
            why = f"expected a command for each name, got {needs!r}"
            raise _field_error(self.folder, "metadata.agentrl.needs", why)
        return dict(cast("Mapping[str, str]", needs))

    def has_test(self, name: str) -> bool:
        """Return whether there is a file of this name in `tests`."""
        return (self.folder / "tests" / name).is_file()

    def files(self, part: str) -> dict[str, Path]:
        """Return the files below `tests` or `solution`, by their path there."""
        return dict(_files_of_part(self.folder / part))

    def as_task(self, task_id: str) -> Task:
        """Return the task; tests and solution stay on disk, where no prompt and no record finds them."""
        shown = {name: value for name, value in self.metadata.items() if isinstance(value, (str, int, float, list))}
        return Task(id=task_id, data={**shown, "question": self.instruction, "folder": str(self.folder)})


def read_harbor_folder(folder: Path) -> HarborTask:
    """Return the task in a folder.

    Raises:
        ConfigError: a file is missing or wrong, or the task needs what agentrl does not have; the message names the field.
    """
    folder = folder.resolve()
    try:
        raw = tomllib.loads((folder / HARBOR_FILE).read_text(encoding="utf-8"))
        read = msgspec.convert(raw, _File)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{folder / HARBOR_FILE}: {error}") from error
    version = read.schema_version or read.version or "1.0"
    if version not in _VERSIONS:
        raise _field_error(folder, "schema_version", f"{version!r} is none of {', '.join(_VERSIONS)}")
    _refuse_needs(folder, read)
    for part, env in (
        ("environment", read.environment.env),
        ("verifier", read.verifier.env),
        ("solution", read.solution.env),
    ):
        _check_env(folder, f"{part}.env", env)
    instruction = _read_text(folder / "instruction.md")
    if not (folder / "tests" / "test.sh").is_file():
        raise ConfigError(f"{folder}: expected tests/test.sh, which writes /logs/verifier/reward.txt; there is none")
    given = read.environment
    task = HarborTask(
        folder=folder,
        instruction=instruction.strip(),
        metadata=read.metadata,
        image=read_dockerfile(folder / "environment", docker_image=given.docker_image, workdir=given.workdir),
        agent_timeout_s=_checked_seconds(folder, "agent.timeout_sec", read.agent.timeout_sec),
        verifier_timeout_s=_checked_seconds(folder, "verifier.timeout_sec", read.verifier.timeout_sec) or 600.0,
        build_timeout_s=_checked_seconds(folder, "environment.build_timeout_sec", given.build_timeout_sec) or 600.0,
        cpus=_checked_cpus(folder, given.cpus),
        memory_mb=_size(folder, "memory", given.memory_mb, given.memory),
        storage_mb=_size(folder, "storage", given.storage_mb, given.storage),
        agent_env=dict(given.env),
        verifier_env=dict(read.verifier.env),
        solution_env=dict(read.solution.env),
    )
    if task.image.workdir == "/":
        raise _field_error(folder, "environment.workdir", f"expected a directory below /, got {given.workdir!r}")
    _ = task.kept, task.needs
    return task


def harbor_tasks(path: str) -> Iterator[Task]:
    """Yield the tasks in a folder, which is one task, or holds folders of tasks at any depth, in order of their paths."""
    root = Path(path)
    if not root.is_dir():
        raise ConfigError(f"{path}: expected a folder of Harbor tasks, or one task; there is no such folder")
    if (root / HARBOR_FILE).is_file():
        yield read_harbor_folder(root).as_task(root.resolve().name)
        return
    found = sorted(file.parent for file in root.rglob(HARBOR_FILE))
    if not found:
        raise ConfigError(f"{path}: no folder below holds a {HARBOR_FILE}")
    for folder in found:
        yield read_harbor_folder(folder).as_task(str(folder.relative_to(root)))


def _refuse_needs(folder: Path, read: _File) -> None:
    """Refuse a task with needs that agentrl cannot meet; the error names the field."""
    given, verifier = read.environment, read.verifier
    needs: dict[str, object] = {
        "steps": read.steps and "tasks of several steps are not played",
        "environment.os": given.os.lower() != "linux" and f"expected linux, got {given.os!r}",
        "environment.gpus": given.gpus and "the sandbox has no GPU",
        "environment.tpu": given.tpu and "the sandbox has no TPU",
        "environment.mcp_servers": given.mcp_servers and "the terminal agent has no tool but bash",
        "environment.healthcheck": given.healthcheck and "start services in the task's own commands",
        "environment.skills_dir": given.skills_dir and "the terminal agent reads no skills",
        "verifier.environment": verifier.environment and "the verifier runs in a copy of the task's own environment",
        "verifier.environment_mode": verifier.environment_mode not in (None, "shared")
        and f"expected 'shared', got {verifier.environment_mode!r}: the tests run over what the agent left",
        "verifier.collect": verifier.collect and "there is no service to collect from",
    }
    for part, user in (("agent", read.agent.user), ("verifier", verifier.user)):
        needs[f"{part}.user"] = user not in (None, "root", 0) and f"the sandbox has one user, root; got {user!r}"
    for part, table in (("environment", given), ("agent", read.agent), ("verifier", verifier)):
        mode = table.network_mode
        needs[f"{part}.network_mode"] = mode not in (None, *_NETWORK_MODES) and (
            f"expected one of {', '.join(_NETWORK_MODES)}, since the sandbox has no network, got {mode!r}"
        )
        needs[f"{part}.allowed_hosts"] = table.allowed_hosts and "the sandbox has no network, so no list of hosts can hold"
    for field, problem in needs.items():
        if problem:
            raise _field_error(folder, field, str(problem))
    for name in _COMPOSE:
        if (folder / "environment" / name).exists():
            raise _field_error(folder, f"environment/{name}", "environments of several containers are not started")
    if (folder / "trajectory.json").exists():
        raise _field_error(folder, "trajectory.json", "episodes begin without an earlier conversation")


def _field_error(folder: Path, field: str, why: str) -> ConfigError:
    return ConfigError(f"{folder}: {field}: {why}; leave the task out, or change the field")


def _check_env(folder: Path, field: str, env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if _NAME.fullmatch(name) is None:
            raise _field_error(folder, field, f"expected a name of letters, digits and underscores, got {name!r}")
        if "\0" in value:
            raise _field_error(folder, f"{field}.{name}", f"expected no zero byte, got {value!r}")
        if _TEMPLATE.search(value):
            raise _field_error(folder, f"{field}.{name}", f"{value!r} asks for a variable of this machine, which stays out")


def _checked_seconds(folder: Path, field: str, value: float | None) -> float | None:
    if value is not None and not 0 < value <= 86_400:
        raise _field_error(folder, field, f"expected seconds above 0, at most a day, got {value!r}")
    return value


def _checked_cpus(folder: Path, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise _field_error(folder, "environment.cpus", f"expected a number above 0, got {value!r}")
    return value


def _size(folder: Path, field: str, mebibytes: int | None, text: str | None) -> int | None:
    if mebibytes is not None and mebibytes < 1:
        raise _field_error(folder, f"environment.{field}_mb", f"expected MiB above 0, got {mebibytes}")
    if text is None:
        return mebibytes
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * _UNIT_MB[match[2].upper()])
    if size < 1:
        raise _field_error(folder, f"environment.{field}", f"expected a size of at least 1M, such as 2G, got {text!r}")
    if mebibytes not in (None, size):
        raise _field_error(folder, f"environment.{field}", f"{text!r} and {field}_mb = {mebibytes} differ")
    return size


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _files_of_part(root: Path) -> Iterator[tuple[str, Path]]:
    refuse_links_out(root, root)
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield str(path.relative_to(root)), path
