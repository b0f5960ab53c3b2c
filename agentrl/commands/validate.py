"""`agentrl validate`: checks the tasks of a run without a model.

The workflow itself plays each task twice against a scripted policy: once with the reference replies, or the task's own
solution, which must score full, and once with empty replies, which must not. Where the workflow has a guess, such as a
constant answer, it must earn nothing. So the real prompt, environment, grader and sandbox are checked.

Invariant: every task is counted, and one without a reference counts as not checked, never as right. Nothing is written.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, cast

from agentrl.commands.evaluate import EpisodeBar
from agentrl.commands.running import Overrides, load_run, run_job
from agentrl.config import RunConfig
from agentrl.data.left_out import LeftOutTask, left_out_rows
from agentrl.data.load import load_tasks
from agentrl.data.playable import playable_tasks
from agentrl.engine.evaluate import evaluate_with
from agentrl.errors import ConfigError, RequestRejected
from agentrl.rollout.episode import run_policy_episode
from agentrl.rollout.scripted_policy import UNLIMITED, ScriptedPolicy
from agentrl.servers.scripted.server import ScriptedCall
from agentrl.support.foreign import visible
from agentrl.types import StopReason, Task, Trajectory
from agentrl.workflow import REWARD_MARGIN, GroupWorkflow, RolloutWorkflow, TellsShortfall, load_workflow

_MAX_TURNS: Final = 64
"""Model calls of an episode of a run that sets no `rollout.max_turns`: a workflow may wait for a reply that never comes."""
_ENDLESS_LIMIT: Final = 100
"""Tasks of an endless set that are checked where the command has no limit."""
_SHOWN: Final = 10
"""Findings of a kind that are printed."""
_Advance: TypeAlias = Callable[[Trajectory], None]
_Replies: TypeAlias = str | Sequence[str]


def validate_command(config: Path, /, *overrides: Overrides, limit: int | None = None) -> None:
    """Check the tasks of a run without a model: references score full, empty replies do not, no prompt is there twice.

    The exit status is 1 if something is to be fixed.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        limit: Check only so many tasks of each set; by default all, and 100 of a set that never ends.
    """
    run = load_run(config, overrides)
    validation = TaskValidation(run, limit=limit)

    async def check() -> None:
        if not print_validation(await validation.check()):
            sys.exit(1)

    run_job(check, lambda: "An interrupted check has no results.", stall_timeout_s=run.engine.stall_timeout_s)


class FindingKind(StrEnum):
    """The kinds of findings about a task."""

    REFERENCE = "reference below full reward"
    EMPTY = "empty reply scores full"
    GUESS = "constant answer earns credit"
    FAILED = "episode failed"
    DUPLICATE = "same prompt twice"
    LEAK = "prompt in both sets"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, which is to be fixed."""

    kind: FindingKind
    where: str
    """The set and the id of the task."""
    detail: str


@dataclass(slots=True)
class SetCounts:
    """The counts of one set of tasks."""

    tasks: int
    left_out: int
    """Tasks beyond the limit."""
    endless: bool = False
    """Whether the set never ends, so that more tasks than the limit follow."""
    full: int = 0
    """References that score full."""
    unchecked: int = 0
    """Tasks whose reference is not known."""


@dataclass(slots=True)
class ValidationReport:
    """The result of a validation."""

    counts: dict[str, SetCounts] = field(default_factory=dict[str, SetCounts])
    """By set, `train` and `held-out`."""
    findings: list[Finding] = field(default_factory=list[Finding])
    prompts_compared: bool = True
    unreadable: tuple[LeftOutTask, ...] = ()
    """Tasks that `unreadable: skip` leaves out."""


class TaskValidation:
    """Plays the tasks of a run against the scripted policy and collects what is found.

    Raises:
        ConfigError: tasks or workflow cannot be used, `limit` is below 1, or a reference is no text.
    """

    def __init__(self, run: RunConfig, *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"--limit {limit}: expected at least 1; omit it to check all tasks")
        read = load_tasks(run.tasks)
        self._workflow = load_workflow(run.workflow, run.workflow_args)
        loaded = playable_tasks(read, run.tasks, self._workflow.refusal)
        endless = loaded.train.is_endless
        train = loaded.train.first(limit or _ENDLESS_LIMIT) if endless else loaded.train.finite
        whole = {"train": train, "held-out": loaded.evaluation}
        self._sets = {name: tasks if limit is None else tasks[:limit] for name, tasks in whole.items() if tasks}
        self._workflow.check_tasks([task for tasks in self._sets.values() for task in tasks])
        self._references = {name: _references(self._workflow, tasks) for name, tasks in self._sets.items()}
        self._guesses = {name: _workflow_guesses(self._workflow, tasks) for name, tasks in self._sets.items()}
        self._replies: dict[str, _Replies] = {}
        """By id of the episode."""
        self._players: dict[str, RolloutWorkflow] = {}
        """Workflows that play with the solution of a task, by id of the episode."""
        self._prompts: dict[str, bytes] = {}
        """Digests of the first prompts, by id of the episode."""
        self._policy = ScriptedPolicy(self._reply)
        turns = run.rollout.max_turns or _MAX_TURNS
        rollout = run.rollout.model_copy(update={"max_turns": turns, "max_episode_tokens": None})
        self._concurrent = run.rollout.max_concurrent_episodes
        self._run_episode = partial(
            run_policy_episode,
            backend=self._policy,
            renderer=self._policy.renderer,
            rollout=rollout,
            sampling=UNLIMITED,
            seed=run.seed,
        )
        counts = {name: SetCounts(len(tasks), len(whole[name]) - len(tasks)) for name, tasks in self._sets.items()}
        counts["train"].endless = endless
        self._report = ValidationReport(
            counts=counts, prompts_compared=self._workflow.prompt_is_task, unreadable=loaded.left_out
        )

    async def check(self) -> ValidationReport:
        """Play all tasks behind a progress bar and return what is found."""
        episodes = [*map(len, self._sets.values()), *map(len, self._references.values()), *map(len, self._guesses.values())]
        with EpisodeBar(sum(episodes)) as advance:
            async with self._workflow.opened():
                for name in self._sets:
                    await self._check_references(name, advance)
                    await self._check_empty(name, advance)
                    await self._check_guesses(name, advance)
        self._compare_prompts()
        return self._report

    def _reply(self, call: ScriptedCall) -> str:
        if call.episode_id not in self._prompts:
            text = self._policy.renderer.decode(call.input_ids, skip_special=True)
            normal = " ".join(text.casefold().split())
            self._prompts[call.episode_id] = hashlib.blake2b(normal.encode(), digest_size=16).digest()
        replies = self._replies.get(call.episode_id, "")
        if isinstance(replies, str):
            return replies
        if call.turn >= len(replies):
            raise RequestRejected(f"the reference has {len(replies)} replies; the workflow asked for one more", status=400)
        return replies[call.turn]

    async def _check_references(self, name: str, advance: _Advance) -> None:
        counts, references = self._report.counts[name], self._references[name]
        tasks = [task for task in self._sets[name] if task.id in references]
        counts.unchecked = counts.tasks - len(tasks)
        for at, task in enumerate(tasks):
            reference = references[task.id]
            if isinstance(reference, RolloutWorkflow):
                self._players[f"{name} reference.{at}"] = reference
            else:
                self._replies[f"{name} reference.{at}"] = reference
        for task, episode in await self._played(f"{name} reference", tasks, advance):
            if self._failed(name, task, episode, "the reference"):
                continue
            if self._is_full(episode):
                counts.full += 1
            else:
                expected = f"expected {self._workflow.full_reward:g}{_shortfall_of(references[task.id])}"
                self._find(FindingKind.REFERENCE, name, task, f"{_ending_of(episode)}; {expected}")

    async def _check_empty(self, name: str, advance: _Advance) -> None:
        for task, episode in await self._played(f"{name} empty", self._sets[name], advance):
            if not self._failed(name, task, episode, "an empty reply") and self._is_full(episode):
                self._find(FindingKind.EMPTY, name, task, _ending_of(episode))

    async def _check_guesses(self, name: str, advance: _Advance) -> None:
        guesses = self._guesses[name]
        tasks = [task for task in self._sets[name] if task.id in guesses]
        self._replies |= {f"{name} guess.{at}": guesses[task.id] for at, task in enumerate(tasks)}
        for task, episode in await self._played(f"{name} guess", tasks, advance):
            if not self._failed(name, task, episode, "a guess") and episode.episode_return > REWARD_MARGIN:
                self._find(FindingKind.GUESS, name, task, f"{guesses[task.id]!r:.120}: {_ending_of(episode)}")

    async def _played(self, name: str, tasks: Sequence[Task], advance: _Advance) -> list[tuple[Task, Trajectory]]:
        if not tasks:
            return []
        report = await evaluate_with(self._play, tasks, max_concurrent=self._concurrent, name=name, on_episode=advance)
        return list(zip(tasks, report.episodes, strict=True))

    async def _play(self, task: Task, *, episode_id: str) -> Trajectory:
        workflow = self._players.get(episode_id, self._workflow)
        return await self._run_episode(workflow, task, episode_id=episode_id)

    def _is_full(self, episode: Trajectory) -> bool:
        return episode.episode_return >= self._workflow.full_reward - REWARD_MARGIN

    def _failed(self, name: str, task: Task, episode: Trajectory, played: str) -> bool:
        if episode.failure is None:
            return False
        self._find(FindingKind.FAILED, name, task, f"with {played}, {episode.stop_reason}: {episode.failure.message}")
        return True

    def _find(self, kind: FindingKind, name: str, task: Task, detail: str) -> None:
        self._report.findings.append(Finding(kind, f"{name} task {task.id}", detail))

    def _compare_prompts(self) -> None:
        """Find tasks with the same first prompt, apart from case and white space."""
        if not self._workflow.prompt_is_task:
            return
        places: defaultdict[bytes, list[tuple[str, Task]]] = defaultdict(list)
        for name, tasks in self._sets.items():
            for at, task in enumerate(tasks):
                if (digest := self._prompts.get(f"{name} empty.{at}")) is not None:
                    places[digest].append((name, task))
        for (first_name, first), *others in places.values():
            for name, task in others:
                kind = FindingKind.DUPLICATE if name == first_name else FindingKind.LEAK
                self._find(kind, name, task, f"the prompt is that of the {first_name} task {first.id}")


def print_validation(report: ValidationReport) -> bool:
    """Print counts and findings, the first of each kind in full; return whether nothing is to be fixed."""
    for name, counts in report.counts.items():
        known = counts.tasks - counts.unchecked
        parts = [f"{counts.tasks} tasks", f"{counts.full} of {known} references score full"]
        parts += [f"{counts.unchecked} without a reference: not checked"] if counts.unchecked else []
        parts += [f"{counts.left_out} beyond the limit"] if counts.left_out else []
        parts += ["the first of tasks that never end"] if counts.endless else []
        print(f"{name:<9} {', '.join(parts)}")
    for number, row in enumerate(left_out_rows(report.unreadable)):
        print(visible(f"{'' if number else 'left out':<9} {row}"))
    if not report.prompts_compared:
        print("prompts   not compared: the workflow has prompt_is_task = False")
    shown = Counter[FindingKind]()
    for finding in report.findings:
        shown[finding.kind] += 1
        if shown[finding.kind] <= _SHOWN:
            print(visible(f"FIX {finding.kind}: {finding.where}: {finding.detail}"))
    for kind, count in shown.items():
        if count > _SHOWN:
            print(f"FIX {kind}: and {count - _SHOWN} more")
    print(f"{len(report.findings)} to fix." if report.findings else "Nothing to fix.")
    return not report.findings


def _references(workflow: RolloutWorkflow, tasks: Sequence[Task]) -> dict[str, _Replies | RolloutWorkflow]:
    """Return the references by task; empty for a workflow whose rewards only exist in a group."""
    found: dict[str, _Replies | RolloutWorkflow] = {}
    if isinstance(workflow, GroupWorkflow):
        return found
    for task in tasks:
        reference = cast("object", workflow.reference(task))
        if isinstance(reference, (str, RolloutWorkflow)):
            found[task.id] = reference
        elif reference is not None:
            replies = cast("Sequence[object]", reference) if isinstance(reference, Sequence) else ()
            texts = [reply for reply in replies if isinstance(reply, str)]
            if not texts or len(texts) < len(replies):
                raise ConfigError(
                    f"task {task.id}: {workflow.name}.reference must return a text, a list of texts for its model calls, or "
                    f"a workflow, got {reference!r:.80}"
                )
            found[task.id] = texts
    return found


def _workflow_guesses(workflow: RolloutWorkflow, tasks: Sequence[Task]) -> dict[str, str]:
    """Return the guesses by task; empty for a workflow whose rewards only exist in a group."""
    if isinstance(workflow, GroupWorkflow):
        return {}
    return {task.id: guess for task in tasks if (guess := workflow.guess(task)) is not None}


def _shortfall_of(reference: object) -> str:
    """Return what a workflow that played with the solution says of a reward below full, if it says anything."""
    return f"; {reference.shortfall}" if isinstance(reference, TellsShortfall) and reference.shortfall else ""


def _ending_of(episode: Trajectory) -> str:
    last = episode.turns[-1].message.get("content") if episode.turns else None
    reply = f", last reply {last[-60:]!r}" if isinstance(last, str) and last else ""
    cut = any(turn.stop_reason is StopReason.LENGTH for turn in episode.turns)
    limit = ", and its max_tokens cut a reply (a token is a byte here): leave max_tokens to the run file" if cut else ""
    return f"return {episode.episode_return:g}, {episode.stop_reason} after {len(episode.turns)} turns{reply}{limit}"
