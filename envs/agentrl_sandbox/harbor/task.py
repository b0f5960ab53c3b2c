"""Task folders of Harbor: `task.toml`, `instruction.md`, `environment/`, `tests/test.sh` and `solution/solve.sh`.

Schema versions 1.0 to 1.4. A setting that agentrl does not honour is a `ConfigError` that names its field, when the task
loads.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from agentrl.data.left_out import LeaveOut, reason_rows
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_sandbox.containers.image_facts import FactsOf, engine_builds
from agentrl_sandbox.harbor.dockerfile import read_dockerfile
from agentrl_sandbox.harbor.judging import (
    CollectCommand,
    HealthCheck,
    Judge,
    artifact_paths,
    collect_problem,
    health_problem,
    judge_image,
)
from agentrl_sandbox.harbor.links import refuse_links_out
from agentrl_sandbox.harbor.recipe import ImageRecipe
from agentrl_sandbox.harbor.unreadable import reason_of
from agentrl_sandbox.harbor.values import check_env, checked_cpus, checked_seconds, checked_size, field_error

HARBOR_FILE: Final = "task.toml"
_VERSIONS: Final = ("1.0", "1.1", "1.2", "1.3", "1.4")
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml")
_CANARY: Final = re.compile(r"(?:<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_NETWORK_MODES: Final = ("no-network", "public")


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
    healthcheck: HealthCheck | None = None
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
    environment: _Environment | None = None
    collect: list[CollectCommand] = []


class _Solution(msgspec.Struct, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class _Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthCheck | None = None
    artifacts: list[str | dict[str, Any]] = []
    dependencies: list[str] = []
    """Steps that are played before it, as all are that stand above it."""
    inherit_prior_session: bool = False


class _File(msgspec.Struct, frozen=True, kw_only=True):
    version: str | None = None
    schema_version: str | None = None
    metadata: dict[str, Any] = {}
    environment: _Environment = _Environment()
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    solution: _Solution = _Solution()
    steps: list[_Step] = []
    multi_step_reward_strategy: str | None = None
    artifacts: list[str | dict[str, Any]] = []


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
    judge: Judge | None = None
    """The environment of the tests, where it is not a copy of the agent's."""
    collect: tuple[CollectCommand, ...] = ()
    healthchecks: tuple[HealthCheck, ...] = ()
    step: str = ""
    """The name of the step that this task is; empty: it is a whole task."""
    goes_on: bool = False
    """Whether this step continues the conversation of the one before it (`inherit_prior_session`)."""
    permits_network: bool = False
    """Whether its agent may have a network, where the run file names one."""
    min_reward: Mapping[str, float] = {}
    """What the named numbers of a step have to reach, or the task ends after it."""
    steps: tuple[HarborTask, ...] = ()
    """The steps that are played one after the other, each in the files that the one before it left; empty: there is one."""
    is_last_reward: bool = False
    """Whether the reward of several steps is that of the last one, and not their mean."""

    @property
    def key(self) -> str:
        """What no other task and no other step has."""
        return f"{self.folder}#{self.step}" if self.step else str(self.folder)

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
            raise field_error(self.folder, "metadata.agentrl.keep", f"expected a list of absolute paths, got {kept!r}")
        return tuple(cast("list[str]", kept))

    @property
    def needs(self) -> dict[str, str]:
        """What the image has to hold, and the shell command that succeeds where it does: `[metadata.agentrl.needs]`."""
        own = self.metadata.get("agentrl")
        needs: object = cast("Mapping[str, Any]", own).get("needs", {}) if isinstance(own, Mapping) else {}
        if not isinstance(needs, Mapping) or not all(isinstance(command, str) for command in needs.values()):
            why = f"expected a command for each name, got {needs!r}"
            raise field_error(self.folder, "metadata.agentrl.needs", why)
        return dict(cast("Mapping[str, str]", needs))

    @property
    def is_judged_apart(self) -> bool:
        """Whether its tests run in a second environment while that of the agent is open."""
        return self.judge is not None or bool(self.steps)

    def for_judge(self) -> HarborTask:
        """Return the task in the environment of its tests, which is this one unless they have one of their own."""
        judge = self.judge
        if judge is None:
            return self
        return msgspec.structs.replace(
            self,
            image=judge.image,
            agent_env=judge.env,
            memory_mb=judge.memory_mb,
            storage_mb=judge.storage_mb,
            build_timeout_s=judge.build_timeout_s,
            metadata={},
        )

    def has_test(self, name: str) -> bool:
        """Return whether there is a file of this name in `tests`."""
        return name in self.files("tests")

    def files(self, part: str) -> dict[str, Path]:
        """Return the files below `tests`, `solution` or `workdir`, by their path there.

        A step has the tests of its task and its own, and its own solution or that of its task.
        """
        if not self.step:
            return dict(_files_of_part(self.folder / part))
        own = dict(_files_of_part(self.folder / "steps" / self.step / part))
        if part == "workdir" or (own and part == "solution"):
            return own
        return {**dict(_files_of_part(self.folder / part)), **own}

    def as_task(self, task_id: str) -> Task:
        """Return the task; tests and solution stay on disk, where no prompt and no record finds them."""
        shown = {name: value for name, value in self.metadata.items() if isinstance(value, (str, int, float, list))}
        return Task(id=task_id, data={**shown, "question": self.instruction, "folder": str(self.folder)})


def read_harbor_folder(folder: Path, facts_of: FactsOf | None = None, *, by_engine: bool = False) -> HarborTask:
    """Return the task in a folder.

    Args:
        folder: of the task.
        facts_of: knows what images say of themselves.
        by_engine: whether an engine builds images from Dockerfiles; they are not read here then.

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
        raise field_error(folder, "schema_version", f"{version!r} is none of {', '.join(_VERSIONS)}")
    _refuse_needs(folder, read)
    _check_variables(folder, read)
    first = folder / "steps" / read.steps[0].name if read.steps else folder
    instruction = _read_text(first / "instruction.md")
    judge = _judge(folder, read, facts_of, by_engine=by_engine)
    given = read.environment
    task = HarborTask(
        folder=folder,
        instruction=_without_canary(instruction),
        metadata=read.metadata,
        image=read_dockerfile(
            folder / "environment",
            docker_image=given.docker_image,
            workdir=given.workdir,
            facts_of=facts_of,
            by_engine=by_engine,
        ),
        agent_timeout_s=checked_seconds(folder, "agent.timeout_sec", read.agent.timeout_sec),
        verifier_timeout_s=checked_seconds(folder, "verifier.timeout_sec", read.verifier.timeout_sec) or 600.0,
        build_timeout_s=checked_seconds(folder, "environment.build_timeout_sec", given.build_timeout_sec) or 600.0,
        cpus=checked_cpus(folder, given.cpus),
        memory_mb=checked_size(folder, "environment.memory", given.memory_mb, given.memory),
        storage_mb=checked_size(folder, "environment.storage", given.storage_mb, given.storage),
        agent_env=dict(given.env),
        verifier_env=dict(read.verifier.env),
        solution_env=dict(read.solution.env),
        judge=judge,
        collect=tuple(read.verifier.collect),
        healthchecks=() if given.healthcheck is None else (given.healthcheck,),
        is_last_reward=read.multi_step_reward_strategy == "final",
        permits_network=given.allow_internet is not False and (read.agent.network_mode or given.network_mode) == "public",
    )
    task = msgspec.structs.replace(task, steps=tuple(_step(task, read, each) for each in read.steps))
    _check_tests(task)
    if task.image.workdir == "/":
        raise field_error(folder, "environment.workdir", f"expected a directory below /, got {given.workdir!r}")
    _ = task.kept, task.needs
    return task


def _check_tests(task: HarborTask) -> None:
    if task.judge is not None and task.judge.has_tests:
        return
    for each in task.steps or (task,):
        if not each.has_test("test.sh"):
            where = f"{task.folder}/steps/{each.step}" if each.step else str(task.folder)
            raise ConfigError(f"{where}: expected tests/test.sh, which writes /logs/verifier/reward.txt; there is none")


def harbor_tasks(
    path: str, leave_out: LeaveOut | None = None, workflow_args: Mapping[str, Any] | None = None
) -> Iterator[Task]:
    """Yield the tasks in a folder, which is one task, or holds folders of tasks at any depth, in order of their paths.

    Args:
        path: of the folder.
        leave_out: takes the folders that cannot be read; None: one of them is an error, which counts all of them.
        workflow_args: of the run, which say whether an engine builds images.

    Raises:
        ConfigError: a folder cannot be read, and `leave_out` does not take it; or no folder can be read.
    """
    root, by_engine = Path(path), engine_builds(workflow_args or {})
    if not root.is_dir():
        raise ConfigError(f"{path}: expected a folder of Harbor tasks, or one task; there is no such folder")
    if (root / HARBOR_FILE).is_file():
        yield read_harbor_folder(root, by_engine=by_engine).as_task(root.resolve().name)
        return
    found = sorted(file.parent for file in root.rglob(HARBOR_FILE))
    if not found:
        raise ConfigError(f"{path}: no folder below holds a {HARBOR_FILE}")
    unreadable: list[tuple[str, str]] = []
    first: ConfigError | None = None
    for folder in found:
        name = str(folder.relative_to(root))
        try:
            task = read_harbor_folder(folder, by_engine=by_engine).as_task(name)
        except ConfigError as error:
            unreadable.append((name, reason_of(error, folder)))
            first = first or error
            if leave_out is not None:
                leave_out(*unreadable[-1])
            continue
        if first is None or leave_out is not None:
            yield task
    if first is None or (leave_out is not None and len(unreadable) < len(found)):
        return
    if len(found) == 1:
        raise first
    counted = f"{len(unreadable)} of the {len(found)} task folders in {path} cannot be read"
    fix = "fix one of them" if leave_out else "fix them, or set `unreadable: skip` beside `format`, which leaves them out"
    raise ConfigError(f"{first}\n{counted}; {fix}:\n  " + "\n  ".join(reason_rows(unreadable))) from first


def _check_variables(folder: Path, read: _File) -> None:
    for part, env in (
        ("environment", read.environment.env),
        ("verifier", read.verifier.env),
        ("verifier.environment", read.verifier.environment.env if read.verifier.environment else {}),
        ("solution", read.solution.env),
    ):
        check_env(folder, f"{part}.env", env)


def _step(task: HarborTask, read: _File, step: _Step) -> HarborTask:
    """Return one step of a task, which is the task with what the step has of its own."""
    folder, part = task.folder, f"steps.{step.name}"
    check_env(folder, f"{part}.verifier.env", step.verifier.env)
    judge = task.judge
    if judge is not None:
        artifacts = _artifacts(folder, f"{part}.artifacts", [*read.artifacts, *step.artifacts])
        judge = msgspec.structs.replace(judge, artifacts=artifacts)
    seconds = step.agent.timeout_sec
    gates = step.min_reward
    return msgspec.structs.replace(
        task,
        step=step.name,
        instruction=_without_canary(_read_text(folder / "steps" / step.name / "instruction.md")),
        agent_timeout_s=checked_seconds(folder, f"{part}.agent.timeout_sec", seconds) or task.agent_timeout_s,
        verifier_timeout_s=checked_seconds(folder, f"{part}.verifier.timeout_sec", step.verifier.timeout_sec) or 600.0,
        verifier_env={**task.verifier_env, **step.verifier.env},
        judge=judge,
        collect=(*task.collect, *step.verifier.collect),
        healthchecks=(*task.healthchecks, *([] if step.healthcheck is None else [step.healthcheck])),
        goes_on=step.inherit_prior_session,
        permits_network=read.environment.allow_internet is not False
        and (step.agent.network_mode == "public" or (task.permits_network and not step.agent.network_mode)),
        min_reward=gates if isinstance(gates, dict) else {} if gates is None else {"reward": gates},
    )


def _artifacts(folder: Path, field: str, artifacts: list[str | dict[str, Any]]) -> tuple[str, ...]:
    try:
        return artifact_paths(artifacts)
    except ValueError as error:
        raise field_error(folder, field, str(error)) from None


def _judge(folder: Path, read: _File, facts_of: FactsOf | None, *, by_engine: bool) -> Judge | None:
    """Return the environment that the tests have for themselves; None: they run over a copy of the agent's."""
    given = read.verifier.environment
    if (read.verifier.environment_mode or ("shared" if given is None else "separate")) == "shared":
        return None
    place = read.environment if given is None else given
    own_image = None if given is None else given.docker_image
    image, has_tests = judge_image(
        folder,
        docker_image=own_image,
        task_image=read.environment.docker_image,
        workdir=place.workdir,
        facts_of=facts_of,
        by_engine=by_engine,
    )
    part = "environment" if given is None else "verifier.environment"
    return Judge(
        image=image,
        has_tests=has_tests,
        env=dict(place.env),
        memory_mb=checked_size(folder, f"{part}.memory", place.memory_mb, place.memory),
        storage_mb=checked_size(folder, f"{part}.storage", place.storage_mb, place.storage),
        build_timeout_s=checked_seconds(folder, f"{part}.build_timeout_sec", place.build_timeout_sec) or 600.0,
        artifacts=_artifacts(folder, "artifacts", read.artifacts),
    )


def _step_needs(folder: Path, read: _File) -> dict[str, object]:
    """Return what the steps of a task need that agentrl does not have, by field."""
    names = [step.name.casefold() for step in read.steps]
    needs: dict[str, object] = {
        "steps": len(set(names)) < len(names) and "expected a name of its own for each step",
        "multi_step_reward_strategy": read.multi_step_reward_strategy not in (None, "mean", "final")
        and f"expected 'mean' or 'final', got {read.multi_step_reward_strategy!r}",
    }
    for number, step in enumerate(read.steps):
        part, own = f"steps.{step.name}", step.verifier
        late = set(step.dependencies) - {each.name for each in read.steps[:number]}
        needs[f"{part}.dependencies"] = late and f"expected names of steps above it, got {', '.join(sorted(late))}"
        needs[f"{part}.name"] = (step.name in ("", ".", "..") or "/" in step.name) and "expected the name of a folder"
        needs[f"{part}.verifier.environment"] = own.environment is not None and "set it for all steps: verifier.environment"
        mode = own.environment_mode
        needs[f"{part}.verifier.environment_mode"] = mode not in (None, read.verifier.environment_mode) and (
            "set it for all steps: verifier.environment_mode"
        )
        needs[f"{part}.verifier.collect"] = collect_problem(own.collect)
        needs[f"{part}.healthcheck"] = health_problem(step.healthcheck)
        needs[f"{part}.trajectory.json"] = (folder / "steps" / step.name / "trajectory.json").exists() and (
            "steps begin without an earlier conversation"
        )
    return needs


def _environment_needs(part: str, given: _Environment) -> dict[str, object]:
    return {
        f"{part}.os": given.os.lower() != "linux" and f"expected linux, got {given.os!r}",
        f"{part}.gpus": given.gpus and "the sandbox has no GPU",
        f"{part}.tpu": given.tpu and "the sandbox has no TPU",
        f"{part}.mcp_servers": given.mcp_servers and "the terminal agent has no tool but bash",
        f"{part}.healthcheck": health_problem(given.healthcheck),
        f"{part}.skills_dir": given.skills_dir and "the terminal agent reads no skills",
    }


def _refuse_needs(folder: Path, read: _File) -> None:
    """Refuse a task with needs that agentrl cannot meet; the error names the field."""
    given, verifier = read.environment, read.verifier
    own = verifier.environment
    needs: dict[str, object] = {
        **_step_needs(folder, read),
        **_environment_needs("environment", given),
        **({} if own is None else _environment_needs("verifier.environment", own)),
        "verifier.environment": own is not None
        and verifier.environment_mode == "shared"
        and "tests that share the agent's environment have none of their own; set environment_mode = 'separate'",
        "verifier.environment.healthcheck": own is not None and own.healthcheck and "the tests wait for nothing",
        "verifier.environment_mode": verifier.environment_mode not in (None, "shared", "separate")
        and f"expected 'shared' or 'separate', got {verifier.environment_mode!r}",
        "verifier.collect": collect_problem(verifier.collect),
    }
    phases: list[tuple[str, _Agent | _Verifier]] = [("agent", read.agent), ("verifier", verifier)]
    for step in read.steps:
        phases += [(f"steps.{step.name}.agent", step.agent), (f"steps.{step.name}.verifier", step.verifier)]
    for part, phase in phases:
        user = phase.user
        needs[f"{part}.user"] = user not in (None, "root", 0) and f"the sandbox has one user, root; got {user!r}"
    environments = [("environment", given), *([] if own is None else [("verifier.environment", own)])]
    for part, table in [*phases, *environments]:
        mode = table.network_mode
        needs[f"{part}.network_mode"] = mode not in (None, *_NETWORK_MODES) and (
            f"expected one of {', '.join(_NETWORK_MODES)}, since the sandbox has no network, got {mode!r}"
        )
        needs[f"{part}.allowed_hosts"] = table.allowed_hosts and "the sandbox has no network, so no list of hosts can hold"
    for field, problem in needs.items():
        if problem:
            raise field_error(folder, field, str(problem))
    for name in _COMPOSE:
        if (folder / "environment" / name).exists():
            raise field_error(folder, f"environment/{name}", "environments of several containers are not started")
    if (folder / "trajectory.json").exists():
        raise field_error(folder, "trajectory.json", "episodes begin without an earlier conversation")


def _without_canary(instruction: str) -> str:
    """Return an instruction without the marks at its beginning that keep it out of corpora; no agent reads them."""
    lines = instruction.strip().split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()


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
