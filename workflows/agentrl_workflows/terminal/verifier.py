"""What a task's own tests say of what an agent left.

Invariant: `tests/test.sh` runs when every process of the agent has ended, over a copy that holds the agent's files and
neither its programs nor its settings: `/usr`, `/etc`, `/tmp`, hidden files of a home, `/tests` and `/logs` are the task's
own. Tests with an environment of their own get the artifacts of the task and nothing else. A test that pays nothing because
the agent broke it is a reward of 0; one that pays nothing anyway is a fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final

from agentrl.errors import EnvironmentFault
from agentrl_sandbox import Ending
from agentrl_sandbox.containers import LayerFile, Workbench
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import MIB, Limits
from agentrl_workflows.terminal.benches import TaskBenches
from agentrl_workflows.terminal.copies import archive_of, unpack
from agentrl_workflows.terminal.fetching_tests import fetches_of, missing_packages
from agentrl_workflows.terminal.reward_files import REWARD_JSON, REWARD_TEXT, read_reward
from agentrl_workflows.terminal.scripts import LAST_CHARS, end_of_output, script_argv

SCRIPT: Final = "test.sh"
_HOME: Final = "/root"
"""Of which the tests see what is not hidden."""
_SAID_CHARS: Final = 16_000
_PACKAGES_FIX: Final = (
    "put what the tests need into the image, or leave the task out (docs/howto/terminal.md, Tests that need packages)"
)
_SYSTEM: Final = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "logs", "proc", "root", "run", "sbin", "solution"}
    | {"sys", "tests", "tmp", "usr"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskVerdict:
    """The reward of an episode."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Named numbers of `reward.json`."""
    broken: str = ""
    """Why the tests named no reward, which is 0 then; empty: they did."""
    said: str = ""
    """The end of what the tests said, for whoever mends the task; no agent and no record gets it."""

    @property
    def last_words(self) -> str:
        """Why the tests pay no more, as far as a message has room."""
        return self.broken or self.said[-LAST_CHARS:] or "(nothing)"


class TaskVerifier:
    """Runs the tests of tasks; remembers of each task what they say of an agent that did nothing."""

    def __init__(self, benches: TaskBenches) -> None:
        self._benches = benches
        self._idle: dict[str, TaskVerdict] = {}
        """By folder, what the tests say of an untouched environment."""

    async def verify(
        self, bench: Workbench, harbor: HarborTask, limits: Limits, *, judge_limits: Limits | None = None
    ) -> TaskVerdict:
        """Return what the tests say of the newest layer, which an agent left; `refuse_own_faults` has to follow.

        Args:
            bench: of the agent.
            harbor: the task.
            limits: of the agent's environment.
            judge_limits: of an environment that the tests have for themselves; None: `limits`.
        """
        if harbor.judge is None:
            await bench.keep(kept_paths(await bench.changed(), harbor), homes=(_HOME,))
            return await run_tests(bench, harbor, limits)
        await bench.keep(harbor.judge.artifacts)
        return await self._judged_apart(bench, harbor, harbor.judge.artifacts, limits, judge_limits or limits)

    async def verify_step(
        self, bench: Workbench, harbor: HarborTask, changed: Set[str], limits: Limits, *, judge_limits: Limits | None = None
    ) -> TaskVerdict:
        """Return what the tests of one step say of the layers of a workbench, which stay as they are for the next step.

        Args:
            bench: of the agent.
            harbor: the step.
            changed: `Workbench.changed` of this step and of those before it.
            limits: of the agent's environment.
            judge_limits: of an environment that the tests have for themselves; None: `limits`.
        """
        own = [*kept_paths(sorted(changed), harbor), *({_HOME} & changed)]
        paths = own if harbor.judge is None else harbor.judge.artifacts
        return await self._judged_apart(bench, harbor, paths, limits, judge_limits or limits)

    async def _judged_apart(
        self, bench: Workbench, harbor: HarborTask, paths: Sequence[str], limits: Limits, judge_limits: Limits
    ) -> TaskVerdict:
        """Return what tests say that run in a workbench of their own, of these paths in the layers of another one."""
        lost = TaskVerdict(reward=0.0, broken=f"{', '.join(paths)} cannot be copied for the tests")
        async with bench.run(limits=limits) as container:
            copy = await archive_of(container, paths, limits.work_mb * MIB)
        if copy is None:
            return lost
        place = harbor.for_judge()
        async with self._benches.opened(place, judge_limits, "second") as own:
            async with own.run(limits=judge_limits) as container:
                is_there = await unpack(container, copy, paths, keep_missing=harbor.judge is not None)
            if not is_there:
                return lost
            await own.keep([path for path in paths if path != _HOME], homes=(_HOME,) if _HOME in paths else ())
            return await run_tests(own, place, judge_limits)

    async def refuse_own_faults(
        self, verdict: TaskVerdict, harbor: HarborTask, limits: Limits, *, judge_limits: Limits | None = None
    ) -> None:
        """Check, once the workbench of the episode is closed, that a verdict without a reward is the agent's doing.

        Raises:
            EnvironmentFault: the tests name no reward for an agent that did nothing, either; or they lack packages.
        """
        script = harbor.files("tests").get(SCRIPT, harbor.folder / "tests" / SCRIPT)
        fetches = fetches_of(script.read_text(errors="replace")) if not verdict.reward and script.is_file() else []
        if not verdict.broken and not fetches:
            return
        idle = await self._said_of_nothing(harbor, limits, judge_limits or limits)
        if missing := missing_packages(fetches, idle.said):
            raise EnvironmentFault(f"{script}: {missing}; {_PACKAGES_FIX}")
        if verdict.broken and idle.broken:
            raise EnvironmentFault(f"{script} names no reward for an agent that did nothing: {idle.broken}")

    async def _said_of_nothing(self, harbor: HarborTask, limits: Limits, judge_limits: Limits) -> TaskVerdict:
        key = harbor.key
        if key not in self._idle:
            async with self._benches.opened(harbor, limits, "alone" if harbor.judge is None else "first") as bench:
                if harbor.judge is None:
                    self._idle[key] = await run_tests(bench, harbor, limits)
                else:
                    paths = harbor.judge.artifacts
                    self._idle[key] = await self._judged_apart(bench, harbor, paths, limits, judge_limits)
        return self._idle[key]


def verifier_variables(harbor: HarborTask) -> dict[str, str]:
    """Return the variables of the image, the agent and the tests, with which the tests run."""
    return {**harbor.image.env, **harbor.agent_env, **harbor.verifier_env}


def kept_paths(changed: Sequence[str], harbor: HarborTask) -> list[str]:
    """Return what the tests see of the agent's changes: the working directory, own directories, and what the task names.

    A directory that holds programs of the tests' PATH is not the agent's own.

    Example:
        >>> [path for path in ("/app", "/etc", "/data") if path.strip("/") not in _SYSTEM]
        ['/app', '/data']
    """
    programs = [place for place in verifier_variables(harbor).get("PATH", "").split(":") if place.startswith("/")]
    own = [path for path in changed if PurePosixPath(path).name not in _SYSTEM]
    own = [path for path in own if not any(_is_below(place, path) for place in programs)]
    further = [harbor.image.workdir, *harbor.kept]
    return own + [path for path in further if path not in ("/", "/root") and not any(_is_below(path, each) for each in own)]


def _is_below(path: str, tree: str) -> bool:
    return PurePosixPath(path).is_relative_to(tree)


async def run_tests(bench: Workbench, harbor: HarborTask, limits: Limits, *, script: str = SCRIPT) -> TaskVerdict:
    """Return what a script of `tests/` says of the layers of a workbench."""
    has_tests = harbor.judge is not None and harbor.judge.has_tests
    own = {} if has_tests else harbor.files("tests")
    tests: dict[str, LayerFile] = {f"/tests/{name}": path for name, path in own.items()}
    await bench.add({**tests, "/logs/verifier/": b"", "/logs/agent/": b""})
    environment = verifier_variables(harbor)
    async with bench.run(directory=harbor.image.workdir, environment=environment, limits=limits) as container:
        result = await container.execute(script_argv(f"/tests/{script}"), timeout_s=harbor.verifier_timeout_s)
    said, end = result.text[-_SAID_CHARS:], end_of_output(result)
    if result.ended is not Ending.EXITED:
        return TaskVerdict(reward=0.0, broken=f"it ended at the {result.ended} limit: {end}", said=said)
    text, structure = await _reward_file(bench, REWARD_TEXT), await _reward_file(bench, REWARD_JSON)
    try:
        found = read_reward(text, structure)
    except ValueError as error:
        return TaskVerdict(reward=0.0, broken=f"{error}; it said: {end}", said=said)
    return TaskVerdict(reward=found.reward, parts=found.parts, said=said)


async def _reward_file(bench: Workbench, path: str) -> bytes | None:
    try:
        return await bench.read(path)
    except OSError:
        return None
