"""The episode of a task folder: a container for the agent, then the task's own tests over what it left.

Invariant: an agent sees neither tests nor solution, which are not in its container. The reward is the one that the tests
name after every process of the agent has ended. A container that does not start is a fault, never a reward of 0.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

import anyio
from pydantic import ValidationError

from agentrl.client import Client, Door, DoorSettings, MessageLike
from agentrl.errors import ConfigError, EnvironmentFault, WorkflowError
from agentrl.support.concurrency import outside_work
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from agentrl_sandbox.containers import LayerFile, Workbench
from agentrl_sandbox.containers.config import containers_of, read_containers_config
from agentrl_sandbox.containers.image_facts import engine_builds, facts_of_images
from agentrl_sandbox.containers.prepared import PREPARE_S
from agentrl_sandbox.containers.protocol import CONTAINER_LIMITS, BenchRole
from agentrl_sandbox.harbor.task import HarborTask, read_harbor_folder
from agentrl_sandbox.types import Limits
from agentrl_workflows.terminal.around_agents import collect, make_ready
from agentrl_workflows.terminal.benches import TaskBenches
from agentrl_workflows.terminal.feedback import TaskFeedback, TurnFeedback, has_feedback
from agentrl_workflows.terminal.image_remarks import refusal_of_folder, remarks_on_images
from agentrl_workflows.terminal.oracle import TaskOracle, has_solution
from agentrl_workflows.terminal.steps import combined_verdict, judged_steps, task_of_step
from agentrl_workflows.terminal.verifier import TaskVerdict, TaskVerifier
from agentrl_workflows.terminal.workplace import Work, Workplace


class _OpenPlaces(NamedTuple):
    """What all episodes share."""

    benches: TaskBenches
    verifier: TaskVerifier
    feedback: TaskFeedback
    turns: anyio.Semaphore
    """Of episodes, which have a container each."""


class TerminalWorkflow(RolloutWorkflow):
    """A workflow whose tasks are Harbor folders; a subclass writes `work`, which gets the container.

    Records `verifier_broken` (1: what the agent left kept the tests from naming a reward, which is 0 then) and the named
    parts of `reward.json` as `reward.NAME`.

    Args:
        images: folders of unpacked images, by the names that tasks have for them; `"*"` stands for every other name, and
            None as its folder for the programs of this machine.
        limits: fields of `Limits` that differ from those of a container; a task that asks for less memory gets less.
        max_open: episodes that have a container at a time.
        containers: where they run, such as `{hosts: [http://10.0.0.7:8710]}`; None: on this machine.
        feedback_weight: what turns earn for a gain of 1 in the feedback of a task that offers it (`tests/feedback.sh`).
        prepare_s: seconds that the commands of a task's image have together; they run once for all its episodes.
        has_packages: images, by the names that tasks have for them, that hold what the commands of Dockerfiles fetch from a
            network; these commands count as done there. `"*"`: all images.
    """

    served: bool = False
    """Whether programs in the container reach the policy, by a door of the episode."""
    no_call: Literal["fail", "allow"] = "fail"
    """With `served`: an agent that ends without a call of the policy is a failure, or what the tests say."""

    def __init__(
        self,
        *,
        images: Mapping[str, str | None] | None = None,
        limits: Mapping[str, Any] | None = None,
        max_open: int = 64,
        containers: Mapping[str, object] | None = None,
        feedback_weight: float = 0.5,
        prepare_s: float = PREPARE_S,
        has_packages: Sequence[str] = (),
    ) -> None:
        if not 0 <= feedback_weight < math.inf:
            raise ConfigError(f"feedback_weight: expected a number of at least 0, got {feedback_weight}")
        try:
            self._limits = Limits.model_validate({**CONTAINER_LIMITS.model_dump(), **(limits or {})})
        except ValidationError as error:
            raise ConfigError(f"limits: {error}") from None
        self._images, self._max_open = dict(images or {}), max_open
        self._where, self._feedback_weight = read_containers_config(containers), feedback_weight
        named = cast("Sequence[object]", has_packages)
        if isinstance(named, str) or not all(isinstance(name, str) for name in named):
            raise ConfigError(f"has_packages: expected a list of names of images, got {has_packages!r}")
        self._prepare_s, self._has_packages = prepare_s, tuple(has_packages)
        self._by_engine = engine_builds({"containers": containers, "has_packages": has_packages})
        if self._by_engine and has_packages:
            raise ConfigError(
                f"has_packages: {self._where.backend} builds the images, so no command counts as done; remove it, or set "
                "`build: steps` in `containers`"
            )
        self._open: _OpenPlaces | None = None

    @abstractmethod
    async def work(self, task: Task, client: Client, place: Workplace) -> None:
        """Let the policy work in `place.container` until it is done.

        A limit of the client ends the episode with `limit_reward`. What the container holds at the end is what counts.
        """

    def programs(self) -> Mapping[str, LayerFile]:
        """Return files that each container of an agent has beside those of its task, by absolute path; none by default."""
        return {}

    def reference(self, task: Task) -> RolloutWorkflow | None:
        """Return the workflow that plays the task with its own `solution/solve.sh`; None where it has none."""
        harbor = read_harbor_folder(Path(task["folder"]), by_engine=self._by_engine)
        return TaskOracle(self.judged, self.full_reward) if has_solution(harbor) else None

    def check_tasks(self, tasks: Sequence[Task]) -> Sequence[str]:
        """Refuse tasks whose Dockerfile needs a network; return what of the others is not carried out, and why.

        Raises:
            ConfigError: tasks cannot be played; the message names the first ones.
        """
        folders = [task["folder"] for task in tasks if "folder" in task.data]
        facts_of = facts_of_images(self._images)
        builder = self._where.backend if self._by_engine else ""
        return remarks_on_images(folders, self._has_packages, facts_of, builder=builder)

    def refusal(self, task: Task) -> str:
        """Return why `check_tasks` refuses a task, with file and instruction; empty: it does not."""
        if "folder" not in task.data:
            return ""
        facts_of = facts_of_images(self._images)
        return refusal_of_folder(Path(task["folder"]), self._has_packages, facts_of, by_engine=self._by_engine)

    async def run(self, task: Task, client: Client) -> float:
        """Return the reward that the tests of the task name.

        Cancellation: the container is ended, and nothing of it is left.
        """
        return await self.play(task, client, self.work)

    async def play(self, task: Task, client: Client, work: Work) -> float:
        """Return the reward that the tests name after `work`, which stands in for the method of this name."""
        return (await self.judged(task, client, work)).reward

    async def judged(self, task: Task, client: Client, work: Work) -> TaskVerdict:
        """Return all that the tests say after `work`; their words are for whoever mends the task, not for the policy."""
        places = self._open
        if places is None:
            raise WorkflowError(f"{self.name}: its containers are closed; use `async with workflow.opened():`")
        harbor = await places.benches.task_in(Path(task["folder"]))
        limits, judge_limits = self.limits_of(harbor), self.limits_of(harbor.for_judge())
        opens_another = harbor.is_judged_apart or (self._feedback_weight and has_feedback(harbor))
        role: BenchRole = "first" if opens_another else "alone"
        verdicts: list[TaskVerdict] = []
        conversation: list[MessageLike] = []
        async with AsyncExitStack() as stack:
            with outside_work():
                await stack.enter_async_context(places.turns)
            bench = await stack.enter_async_context(places.benches.opened(harbor, limits, role))
            if programs := self.programs():
                await bench.add(programs)
            async with client.served(self._door(work)) if self.served else nullcontext() as door:
                play = partial(self._play_step, task, client, work, bench, door, limits, conversation)
                if harbor.steps:
                    verdicts = await judged_steps(bench, harbor, places.verifier, play, limits, judge_limits)
                elif problem := await play(harbor):
                    raise EnvironmentFault(f"{harbor.folder}: {problem}")
            if self.served:
                client.settle_refusals()  # of processes that went on when the agent had ended
            if not harbor.steps:
                verdicts = [await places.verifier.verify(bench, harbor, limits, judge_limits=judge_limits)]
        for part, each in zip(harbor.steps or (harbor,), verdicts, strict=False):
            await places.verifier.refuse_own_faults(each, part, limits, judge_limits=judge_limits)
        verdict = combined_verdict(harbor, verdicts) if harbor.steps else verdicts[0]
        parts = {f"reward.{name}": value for name, value in verdict.parts.items() if name.isidentifier()}
        client.record(verifier_broken=bool(verdict.broken), **parts)
        return verdict

    async def _play_step(
        self,
        task: Task,
        client: Client,
        work: Work,
        bench: Workbench,
        door: Door | None,
        limits: Limits,
        conversation: list[MessageLike],
        harbor: HarborTask,
    ) -> str:
        """Let `work` work in a container for a task or one of its steps; return why it could not begin, or nothing."""
        if (places := self._open) is None:
            raise WorkflowError(f"{self.name}: its containers were closed during an episode")
        port = None if door is None else urlsplit(door.server_url).port
        environment = {**harbor.image.env, **harbor.agent_env}
        network = self._where.agent_network if harbor.permits_network else None
        running = bench.run(directory=harbor.image.workdir, environment=environment, port=port, network=network)
        async with running as container:
            if problem := await make_ready(container, harbor):
                return problem
            turns = TurnFeedback(places.feedback, container, harbor, limits, self._feedback_weight)
            if not harbor.goes_on:
                conversation.clear()
            await work(task_of_step(task, harbor), client, Workplace(container, harbor, door, turns, conversation))
            await collect(container, harbor)
        return ""

    def _door(self, work: Work) -> DoorSettings:
        """Return the settings of a door: the tests alone reward, and only the agent of this class has to call."""
        is_agent = work == self.work
        return DoorSettings(rewards="none", no_call=self.no_call if is_agent else "allow")

    def limits_of(self, harbor: HarborTask) -> Limits:
        """Return the limits of a task's containers: those of the run, or less where the task asks for less."""
        memory, storage = (
            min(own, asked) if asked else own
            for own, asked in ((self._limits.memory_mb, harbor.memory_mb), (self._limits.work_mb, harbor.storage_mb))
        )
        return self._limits.model_copy(update={"memory_mb": memory, "work_mb": storage})

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open the containers.

        Raises:
            ConfigError: this machine cannot run them, or an image is no folder of one.
        """
        opened = containers_of(self._where, images=self._images, limits=self._limits, max_open=self._max_open)
        async with opened as containers:
            benches = TaskBenches(
                containers,
                prepare_s=self._prepare_s,
                has_packages=self._has_packages,
                facts_of=facts_of_images(self._images),
                by_engine=self._by_engine,
            )
            turns = anyio.Semaphore(self._max_open)
            self._open = _OpenPlaces(benches, TaskVerifier(benches), TaskFeedback(benches), turns)
            try:
                yield
            finally:
                self._open = None
