"""What a task's own tests say of what an agent left.

Invariant: `tests/test.sh` runs when every process of the agent has ended, over a copy that holds the agent's files and
neither its programs nor its settings: `/usr`, `/etc`, `/tmp`, hidden files of a home, `/tests` and `/logs` are the task's
own. A test that pays nothing because the agent broke it is a reward of 0; one that pays nothing anyway is a fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, cast

from agentrl.errors import EnvironmentFault
from agentrl_sandbox import Ending
from agentrl_sandbox.containers import LayerFile, Workbench
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_sandbox.types import Limits
from agentrl_workflows.terminal.benches import TaskBenches, end_of_output

REWARD_TEXT: Final = "/logs/verifier/reward.txt"
REWARD_JSON: Final = "/logs/verifier/reward.json"
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


class TaskVerifier:
    """Runs the tests of tasks; remembers of each task whether they can name a reward at all."""

    def __init__(self, benches: TaskBenches) -> None:
        self._benches = benches
        self._works: dict[str, str] = {}
        """By folder, why the tests over an untouched environment name no reward; empty: they do."""

    async def verify(self, bench: Workbench, harbor: HarborTask, limits: Limits) -> TaskVerdict:
        """Return what the tests say of the newest layer, which an agent left; `refuse_own_faults` has to follow."""
        await bench.keep(kept_paths(await bench.changed(), harbor), homes=("/root",))
        return await run_tests(bench, harbor, limits)

    async def refuse_own_faults(self, verdict: TaskVerdict, harbor: HarborTask, limits: Limits) -> None:
        """Check, once the workbench of the episode is closed, that a verdict without a reward is the agent's doing.

        Raises:
            EnvironmentFault: the tests name no reward for an agent that did nothing, either.
        """
        if verdict.broken and (own := await self._own_fault(harbor, limits)):
            raise EnvironmentFault(f"{harbor.folder}/tests/test.sh names no reward for an agent that did nothing: {own}")

    async def _own_fault(self, harbor: HarborTask, limits: Limits) -> str:
        key = str(harbor.folder)
        if key not in self._works:
            async with self._benches.opened(harbor, limits) as bench:
                self._works[key] = (await run_tests(bench, harbor, limits)).broken
        return self._works[key]


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


async def run_tests(bench: Workbench, harbor: HarborTask, limits: Limits, *, script: str = "test.sh") -> TaskVerdict:
    """Return what a script of `tests/` says of the layers of a workbench."""
    tests: dict[str, LayerFile] = {f"/tests/{name}": path for name, path in harbor.files("tests").items()}
    await bench.add({**tests, "/logs/verifier/": b"", "/logs/agent/": b""})
    environment = verifier_variables(harbor)
    async with bench.run(directory=harbor.image.workdir, environment=environment, limits=limits) as container:
        result = await container.execute(["/bin/bash", f"/tests/{script}"], timeout_s=harbor.verifier_timeout_s)
    if result.ended is not Ending.EXITED:
        return TaskVerdict(reward=0.0, broken=f"it ended at the {result.ended} limit: {end_of_output(result)}")
    text, structure = await _reward_file(bench, REWARD_TEXT), await _reward_file(bench, REWARD_JSON)
    try:
        return read_reward(text, structure)
    except ValueError as error:
        return TaskVerdict(reward=0.0, broken=f"{error}; it said: {end_of_output(result)}")


async def _reward_file(bench: Workbench, path: str) -> bytes | None:
    try:
        return await bench.read(path)
    except OSError:
        return None


def read_reward(text: bytes | None, structure: bytes | None) -> TaskVerdict:
    """Return the reward in the contents of `reward.txt` and `reward.json`; None: there is no such file.

    A JSON file holds a number, or named ones: the one called `reward`, or else their mean, is the reward.

    Raises:
        ValueError: there is no number, it is not finite, or the two files differ.

    Example:
        >>> read_reward(b"0.5", None).reward, read_reward(None, b'{"reward": 1, "style": 0.2}').reward
        (0.5, 1.0)
    """
    found: list[TaskVerdict] = []
    if text is not None:
        found.append(TaskVerdict(reward=_finite_number(text.decode(errors="replace").strip(), REWARD_TEXT)))
    if structure is not None:
        value: object = json.loads(structure)
        if isinstance(value, dict):
            named = cast("dict[str, object]", value)
            parts = {name: _finite_number(part, REWARD_JSON) for name, part in named.items()}
            if not parts:
                raise ValueError(f"{REWARD_JSON} has no number")
            found.append(TaskVerdict(reward=parts.get("reward", sum(parts.values()) / len(parts)), parts=parts))
        else:
            found.append(TaskVerdict(reward=_finite_number(value, REWARD_JSON)))
    if not found:
        raise ValueError(f"it wrote neither {REWARD_TEXT} nor {REWARD_JSON}")
    if len(found) == 2 and found[0].reward != found[1].reward:
        raise ValueError(f"{REWARD_TEXT} says {found[0].reward:g} and {REWARD_JSON} {found[1].reward:g}")
    return found[-1]


def _finite_number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{where}: expected a number, got {value!r:.80}")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{where}: expected a number, got {value!r:.80}") from None
    if not math.isfinite(number):
        raise ValueError(f"{where}: expected a finite number, got {value!r:.80}")
    return number
