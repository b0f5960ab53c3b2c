"""An agent that is a program of its own, in any language: it finds the policy by the variables of its environment.

    workflow:
      command: [./agent.sh, "{task.question}"]
      result: reward.json

    agentrl train examples/command/run.yaml --dry-run

The program runs once an episode, in a working directory of its own that holds `task.json`. The variables are those of
`Door.environment`, such as `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL`, which the clients of these APIs read by themselves.

Invariant: an episode has the reward that the one thing named which the run file chose, or is a failure; a program that broke
is never a silent 0. No process of the program holds a secret that rewards, unless the run file says so (`rewards`). The
processes of an episode end before the episode does.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

import anyio
import anyio.to_thread
from pydantic import Field, ValidationError, field_validator

from agentrl.client import Client, Door, DoorSettings
from agentrl.config.base import Words
from agentrl.episode.checks import check_reward
from agentrl.errors import ConfigError, EnvironmentFault, WorkflowError
from agentrl.support.user_code import boundary, import_user_object
from agentrl.types import JsonValue, Task
from agentrl.workflow import RolloutWorkflow
from agentrl_sandbox import Ending, Limits, Program, Result, SandboxConfig, SandboxPool, open_sandbox
from agentrl_sandbox.base import no_passage
from agentrl_sandbox.types import check_paths
from agentrl_sandbox.unsafe import write_tree
from agentrl_workflows.command_places import PROGRAMS, Left, Wanted, run_inside, run_outside


class Work(NamedTuple):
    """The things that a program left, for a grader of three arguments. The program is over, and its processes have ended."""

    files: Mapping[str, bytes]
    """The regular files of its working directory, by their paths."""
    sandbox: SandboxPool
    """Runs hidden tests, each in a sandbox of its own."""


AnswerGrader: TypeAlias = Callable[..., float | Awaitable[float]]
TASK_FILE: Final = "task.json"
_FIELD: Final = re.compile(r"\{(task|door)\.([A-Za-z_][A-Za-z0-9_]*)\}")
_LAST_CHARS: Final = 2_000


class CommandSettings(DoorSettings):
    """The settings of an agent that is a program: `workflow` in a run file, where it is no `module:Name`."""

    command: Words = Field(min_length=1)
    """The program and its arguments. `{task.FIELD}` stands for a field of the task, `{door.server_url}` for the address of
    the policy, which takes the key of the environment; `{door.base_url}`, `{door.url}` and `{door.key}` hold the key, which
    every user of the machine can read there. Words with a slash that name a file below the directory in which
    the run starts, such as `./agent.sh`, become absolute paths."""
    env: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Variables beside those of the door, PATH, LANG, HOME and TMPDIR; the same words stand for fields as in `command`, and
    `{door.reward_url}` where `rewards` gives it away."""
    rewards: Literal["none", "turns", "all"] = "none"
    """The rewards that the program may post to `AGENTRL_REWARD_URL`: `none`, those of single answers (`turns`), or the final
    one, too (`all`, which excludes `grader`, `result` and `exit_rewards`). The commands of a coding agent inherit the
    variable, so let only a program reward that runs no command of the model."""
    inherit: tuple[str, ...] = ()
    """Variables of this process that the program gets, too, by name."""
    sandbox: SandboxConfig | None = None
    """Run the program in a sandbox that reaches nothing but the door: `true`, or the fields of `SandboxConfig`; None: it
    runs as a process of this user. Its limits `wall_s` and `output_kb` are `timeout_s` and `output_kb` below."""
    directory: str | None = None
    """A directory whose contents the working directory begins with, such as `tasks/{task.id}`; None: it is empty."""
    files: str | None = None
    """A field of the task with texts by path, which are written into the working directory, too."""
    hide: tuple[str, ...] = ("answer", "reference", "tests", "driver", "calls")
    """Fields of the task that `task.json` leaves out: the program, and so the policy, can read the file."""
    result: str | None = None
    """A file of the working directory that the program writes: the reward, or `{"reward": ...}`, a number or named parts.
    Commands of the model that run there can write it, too; judge such a program by a `grader`."""
    grader: str | None = None
    """`module:name` of a function `(text, task) -> float`, or `(text, task, work) -> float`, where `work` is a `Work`; the
    text is the program's standard output."""
    exit_rewards: Mapping[int, float] = Field(default_factory=dict[int, float])
    """The reward of each exit status, such as `{0: 1.0, 1: 0.0}`."""
    ok_statuses: tuple[int, ...] = (0,)
    """Exit statuses of a program that did its work, beside those of `exit_rewards`; any other end is a crash."""
    on_crash: Literal["fault", "reward"] = "fault"
    """A crash is a failed episode, which runs again (`fault`), or the policy's doing, which gets `crash_reward`."""
    crash_reward: float | None = None
    """With `on_crash: reward`."""
    timeout_s: float = Field(default=3600.0, gt=0)
    """Seconds that the program has; a program over it is ended, which is a crash. `rollout.episode_timeout_s` holds, too."""
    output_kb: int = Field(default=1024, ge=1)
    """Standard output and standard error, in KiB each; a program over it is ended, which is a crash."""
    limit_reward: float = 0.0
    """Reward of an episode that a turn, token or context limit ended, unless the program has named one."""

    @field_validator("sandbox", mode="before")
    @classmethod
    def _read_sandbox(cls, value: object) -> object:
        return {} if value is True else None if value is False else value


class CommandWorkflow(RolloutWorkflow):
    """Starts a program for each episode; what the run file names sets its reward: a result file, a grader, or the program.

    Args:
        settings: the fields of `CommandSettings`.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - the values of a run file, which pydantic checks
        try:
            self._settings = given = CommandSettings(**settings)
        except ValidationError as error:
            raise ConfigError(f"workflow: {error}") from None
        if (given.on_crash == "reward") != (given.crash_reward is not None):
            raise ConfigError("workflow: crash_reward is the reward of `on_crash: reward`; set both or neither")
        if given.sandbox is not None and given.sandbox.backend in ("docker", "remote"):
            raise no_passage(given.sandbox.backend)
        _check_sources(given)
        self.limit_reward = given.limit_reward
        self._grade = None if given.grader is None else _imported_grader(given.grader)
        self._grades_files = self._grade is not None and _takes_work(self._grade)
        self.sandbox_config = given.sandbox or (SandboxConfig() if self._grades_files else None)
        """Which sandbox `opened` opens, if any; `agentrl doctor` tests it."""
        self._pool: SandboxPool | None = None
        self._here = Path.cwd()

    @property
    def name(self) -> str:
        return Path(self._settings.command[0]).name

    @property
    def sandbox(self) -> SandboxPool:
        """The open sandbox.

        Raises:
            WorkflowError: `opened` was not entered.
        """
        if self._pool is None:
            raise WorkflowError(f"{self.name}: its sandbox is closed; run episodes inside `async with workflow.opened():`")
        return self._pool

    async def run(self, task: Task, client: Client) -> float | None:
        """Run the program to its end and return the reward; None where it has posted one."""
        with TemporaryDirectory(prefix="agentrl-episode-", ignore_cleanup_errors=True) as folder:
            place = Path(folder)
            await anyio.to_thread.run_sync(self._prepare, place, task)
            async with client.served(self._settings) as door:
                left = await self._play(task, door, place)
            if self._settings.on_crash == "reward":
                client.settle_refusals()
            try:
                return await self._reward(task, client, left)
            except WorkflowError as error:
                if client.limit_reached is not None and client.unresolved_error is not None:
                    raise client.unresolved_error from error  # it had no call left to earn a reward with
                raise

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open the sandbox, where programs run in it or a grader asks for it.

        Raises:
            ConfigError: this machine cannot run it.
        """
        if self.sandbox_config is None:
            yield
            return
        async with open_sandbox(self.sandbox_config) as self._pool:
            try:
                yield
            finally:
                self._pool = None

    def _prepare(self, place: Path, task: Task) -> None:
        settings = self._settings
        if settings.directory is not None:
            source = self._here / _filled(settings.directory, task, None)
            try:
                shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True)
            except OSError as error:
                raise WorkflowError(f"workflow.directory: cannot copy {source}: {error}") from error
        if settings.files is not None:
            _write_texts(place, task.data.get(settings.files), settings.files)
        shown = {name: value for name, value in task.data.items() if name not in settings.hide}
        (place / TASK_FILE).write_text(json.dumps({"id": task.id, **shown}, ensure_ascii=False))

    async def _play(self, task: Task, door: Door, place: Path) -> Left:
        settings = self._settings
        words = [_filled(word, task, door) for word in settings.command]
        own = {name: _filled(value, task, door) for name, value in settings.env.items()}
        inherited = {name: os.environ[name] for name in settings.inherit if name in os.environ}
        environment = {**inherited, **door.environment(with_rewards=settings.rewards != "none"), **own}
        wanted = Wanted(result=settings.result, files=self._grades_files)
        files = {word: path for word in words if (path := self._found(word)) is not None}
        limits = Limits(wall_s=settings.timeout_s, output_kb=settings.output_kb)
        if settings.sandbox is None:
            program = Program(argv=tuple(str(files.get(word, word)) for word in words), environment=environment)
            return await run_outside(program, limits, place, door, wanted)
        seen = ("/usr", "/bin", "/sbin", *settings.sandbox.readable)
        carried = {word: path for word, path in files.items() if not any(path.is_relative_to(tree) for tree in seen)}
        named = {f"{number}/{path.name}": path for number, path in enumerate(carried.values())}
        shown = {word: str(path) for word, path in files.items()}
        shown |= dict(zip(carried, (f"{PROGRAMS}/{name}" for name in named), strict=True))
        program = Program(argv=tuple(shown.get(word, word) for word in words), environment=environment)
        bounds = settings.sandbox.limits.model_copy(update={"wall_s": limits.wall_s, "output_kb": limits.output_kb})
        return await run_inside(program, bounds, place, named, door, self.sandbox, wanted)

    def _found(self, word: str) -> Path | None:
        """Return the file below the run's directory that a word of the command names; None: it names none."""
        path = self._here / word
        return path if "/" in word and "\n" not in word and len(word) < 1024 and path.is_file() else None

    async def _reward(self, task: Task, client: Client, left: Left) -> float | None:
        settings, episode, result = self._settings, client.episode, left.result
        status = result.exit_status
        if status is not None and status in settings.exit_rewards:
            return settings.exit_rewards[status]
        if status is None or status not in (*settings.ok_statuses, *settings.exit_rewards):
            return self._crashed(client, result)
        if episode.final_reward is not None:
            return None
        if settings.result is not None:
            client.reward_final(_read_reward(settings.result, left.reward_file))
            return None
        if self._grade is not None:
            return await self._graded(result.stdout.decode(errors="replace").strip(), task, left.files)
        raise WorkflowError(
            f"{self.name} ended, and nothing named its reward: set workflow.grader, workflow.result or "
            "workflow.exit_rewards, or let the program post to $AGENTRL_REWARD_URL with `workflow.rewards: all`; it said: "
            f"{_last_output(result)}"
        )

    def _crashed(self, client: Client, result: Result) -> float | None:
        """Return the reward of a crash. A limit, or a call that failed, is what its cause was, if it is the last event."""
        if client.unresolved_error is not None:
            raise client.unresolved_error
        settings = self._settings
        if settings.on_crash == "reward":
            client.record(crashed=1.0)
            return settings.crash_reward if client.episode.final_reward is None else None
        ending = f"exit status {result.exit_status}" if result.ended is Ending.EXITED else _crash_of(result)
        raise EnvironmentFault(f"{self.name} broke ({ending}), and workflow.on_crash is fault: {_last_output(result)}")

    async def _graded(self, text: str, task: Task, files: Mapping[str, bytes]) -> float:
        assert self._grade is not None
        with boundary(EnvironmentFault, f"the grader, task {task.id}"):
            graded = self._grade(text, task, Work(files, self.sandbox)) if self._grades_files else self._grade(text, task)
            value = await graded if inspect.isawaitable(graded) else graded
        return check_reward(value, f"workflow.grader, task {task.id}")


def _check_sources(settings: CommandSettings) -> None:
    """Refuse settings by which two things would set the final reward, or by which one would be in sight of others."""
    named = [name for name in ("result", "grader", "exit_rewards") if getattr(settings, name)]
    if settings.rewards == "all" and named:
        raise ConfigError(
            f"workflow.rewards: all lets the program set the final reward, and so does workflow.{named[0]}; choose one, or "
            "`rewards: turns` for rewards of single answers alone"
        )
    if settings.result is not None and settings.grader is not None:
        raise ConfigError("workflow.result and workflow.grader both set the final reward; drop one of them")
    if any("{door.reward_url}" in word for word in settings.command):
        raise ConfigError("workflow.command: {door.reward_url} would be in sight of all programs; it is $AGENTRL_REWARD_URL")
    if settings.rewards == "none" and any("{door.reward_url}" in value for value in settings.env.values()):
        raise ConfigError(
            "workflow.env: {door.reward_url} is given to a program by `workflow.rewards: turns` or `all` alone"
        )


def _filled(text: str, task: Task, door: Door | None) -> str:
    """Return text with the fields of the task and the door in place of their words."""

    def value(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "door" and door is not None and name in ("base_url", "url", "key", "server_url"):
            return str(getattr(door, name))
        if kind == "door" and name == "reward_url" and door is not None and door.reward_key is not None:
            return door.reward_url
        if kind == "task" and name == "id":
            return task.id
        if kind == "task" and name in task.data:
            value = task.data[name]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        of_door = [f"{{door.{each}}}" for each in ("server_url", "base_url", "url", "key")]
        there = ["{task.id}", *(f"{{task.{each}}}" for each in task.data), *of_door]
        raise WorkflowError(f"workflow: {match[0]} stands for nothing; there is {', '.join(there)}")

    return _FIELD.sub(value, text)


def _write_texts(place: Path, texts: object, field: str) -> None:
    """Write the files in a field of a task."""
    is_map = isinstance(texts, Mapping)
    files = cast("Mapping[str, object]", texts) if is_map else {}
    if not is_map or not all(isinstance(text, str) for text in files.values()):
        raise WorkflowError(f"workflow.files: expected texts by path in the field {field!r} of the task, got {texts!r:.80}")
    data = {path: str(text).encode(errors="surrogatepass") for path, text in files.items()}
    check_paths(data)
    write_tree(place, data)


def _takes_work(grader: AnswerGrader) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in kinds for each in inspect.signature(grader).parameters.values()) > 2  # (text, task, work)


def _imported_grader(spec: str) -> AnswerGrader:
    grader = import_user_object(spec, "workflow.grader")
    if not callable(grader):
        raise ConfigError(f"workflow.grader: {spec} is no function `(text, task) -> float` or `(text, task, work) -> float`")
    return cast("AnswerGrader", grader)


def _read_reward(name: str, content: bytes | OSError) -> float | Mapping[str, float]:
    """Return the reward in a result file: a number, named parts, or either as the field `reward`."""
    if isinstance(content, OSError):
        raise WorkflowError(f"workflow.result: the program ended and left no {name}: {content.strerror}")
    try:
        value = cast("JsonValue", json.loads(content))
    except ValueError as error:
        raise WorkflowError(f"workflow.result: {name} is not JSON: {error}") from error
    if isinstance(value, Mapping) and "reward" in value:
        value = value["reward"]
    return cast("float | Mapping[str, float]", value)


def _crash_of(result: Result) -> str:
    return f"signal {result.signal}" if result.ended is Ending.KILLED else f"the {result.ended} limit"


def _last_output(result: Result) -> str:
    output = (result.stderr or result.stdout).decode(errors="replace").strip()
    return output[-_LAST_CHARS:] or "(it wrote nothing)"
