"""The base class of workflows: a workflow drives one episode of one task through an OpenAI-compatible client.

Invariant: a workflow returns a finite reward or a trajectory of its own episode; anything else is a `WorkflowError`, never
a reward of 0.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any, Final, Protocol, TypeAlias, cast, runtime_checkable

from agentrl.client import Client
from agentrl.episode.checks import check_reward
from agentrl.errors import ConfigError, WorkflowError
from agentrl.support.concurrency import SharedContext
from agentrl.support.user_code import boundary, import_user_module
from agentrl.types import MemberAdvantages, StopReason, Task, Trajectory

WorkflowFunction = Callable[..., Awaitable[float | None]]
"""`async def solve(task, client) -> float`; None where it has called `client.reward_final`."""


REWARD_MARGIN: Final = 1e-6
"""The most by which a return that counts as `full_reward` may lie below it."""
_SHARED = "_agentrl_shared"
_Opening: TypeAlias = Callable[[Any], AbstractAsyncContextManager[None]]


def _shared(opening: _Opening) -> _Opening:
    """Return an `opened` whose blocks share the outermost one's; `super().opened()` is shared by itself."""
    if hasattr(opening, _SHARED):  # a class that `dataclass(slots=True)` made again
        return opening
    key = f"_opened_{id(opening)}"

    @wraps(opening)
    def opened(self: RolloutWorkflow) -> AbstractAsyncContextManager[None]:
        if key not in self.__dict__:
            object.__setattr__(self, key, SharedContext(partial(opening, self), self.name))  # a class may be frozen
        return cast("SharedContext", self.__dict__[key]).block()

    setattr(opened, _SHARED, True)
    return opened


class RolloutWorkflow(ABC):  # noqa: B024 - subclasses have abstract methods
    """One episode, written as ordinary async Python against an OpenAI-compatible client.

    One instance runs many episodes at once: keep the state of an episode in local variables of `run`.

    Example:
        >>> class Echo(RolloutWorkflow):
        ...     async def run(self, task: Task, client: Client) -> float:
        ...         messages = [{"role": "user", "content": task["question"]}]
        ...         completion = await client.chat.completions.create(messages=messages)
        ...         return float(completion.choices[0].message.content == task["answer"])
        >>> Echo().name
        'Echo'
    """

    limit_reward: float = 0.0
    """Final reward of an episode that a turn, token or context limit ended: to reach a limit is the policy's doing."""
    deadline_reward: float | None = None
    """Final reward of an episode that missed `rollout.episode_timeout_s` by the policy's doing (calls of the model filled
    it, `EpisodeCalls.filled_time`); None: `limit_reward`. Else the episode is a failure, without a reward."""
    full_reward: float = 1.0
    """Return of an episode that solves its task; `agentrl validate` expects it of reference replies."""
    prompt_is_task: bool = True
    """Whether two tasks with the same first prompt are the same task; False where an id or a seed makes another world."""

    def __init_subclass__(cls, **options: Any) -> None:  # noqa: ANN401 - those of other base classes
        super().__init_subclass__(**options)
        if "opened" in vars(cls):
            cls.opened = cast("Any", _shared(cls.opened))

    @property
    def name(self) -> str:
        """The name of this workflow in messages."""
        return type(self).__name__

    async def run(self, task: Task, client: Client) -> float | None:
        """Drive one episode and return its final reward; None after `client.reward_final(value)`.

        Turns may have rewards too: `client.turns[-1].reward(value)`. An exception is a failed episode, not a reward; raise
        `EnvironmentFault` when an environment or tool broke. A workflow that overrides `rollout` needs no `run`.

        Cancellation: arrives at the episode's deadline or the end of the run; let it through. Code that blocks the thread
        cannot be interrupted and delays every other episode.
        """
        raise WorkflowError(f"{self.name} implements neither run nor rollout")

    def reference(self, task: Task) -> str | Sequence[str] | RolloutWorkflow | None:
        """Return the reply of a policy that solves the task, for `agentrl validate`; by default the field `reference`.

        One text answers every call of the episode; a list has one text for each. A workflow plays the task by itself, inside
        `opened` of this one, and may tell its `shortfall`. None: the solution is not known.
        """
        return task.data.get("reference")

    def check_tasks(self, tasks: Sequence[Task]) -> Sequence[str]:
        """Refuse tasks that cannot be played, before anything starts; return remarks on the others, for the plan.

        Tasks of sources that never end are not among them. By default all can be played.

        Raises:
            ConfigError: one cannot be played with the arguments of this workflow.
        """
        del tasks
        return ()

    def refusal(self, task: Task) -> str:
        """Return why `check_tasks` refuses a task, in words that fit other tasks with the same fault; empty: it does not.

        Sources with `unreadable: skip` leave such tasks out, before `check_tasks` sees them.
        """
        del task
        return ""

    def guess(self, task: Task) -> str | None:
        """Return a reply that knows nothing, for `agentrl validate`: it names the tasks where this earns something."""
        del task
        return None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Hold open what all episodes share, such as a pool of environments; an inner block shares the outer one's."""
        yield

    async def rollout(self, task: Task, client: Client) -> Trajectory:
        """Return the trajectory of one episode; token-level workflows override this instead of `run`."""
        returned = await self.run(task, client)
        await client.backend.settle()
        if returned is None and client.episode.final_reward is not None:
            return client.close(StopReason.COMPLETED)
        return client.close(StopReason.COMPLETED, final_reward=check_reward(returned, f"{self.name}.run, task {task.id}"))


@runtime_checkable
class TellsShortfall(Protocol):
    """A workflow that `RolloutWorkflow.reference` returned, and that knows why it was not paid in full."""

    @property
    def shortfall(self) -> str:
        """The reason, such as the last words of a task's tests; empty where there is none."""
        ...


class GroupWorkflow(RolloutWorkflow):
    """A workflow whose rewards compare the episodes of a group, such as a ranking by a judge.

    Only training has groups: `agentrl eval` and `run_episode` sample single episodes, whose reward is that of `run`.
    """

    @abstractmethod
    async def score_group(self, task: Task, episodes: Sequence[Trajectory]) -> Sequence[float] | MemberAdvantages:
        """Return the final reward of each episode, which takes the place of what `run` returned; or its advantage.

        The objective is the expected own score less the mean of the others. `MemberAdvantages` are trained as they are, and
        the final rewards stay those of `run` (`agentrl_rewards.pass_at_k.pass_at_k`).

        Called once, with the members that did not fail, in order. A failure is repeated up to `rollout.episode_retries`
        times; then every member is a failed episode, and the group is dropped.
        """


class FunctionWorkflow(RolloutWorkflow):
    """A workflow made of a plain `async def solve(task, client) -> float`."""

    def __init__(self, function: WorkflowFunction, args: Mapping[str, Any] | None = None) -> None:
        self._function = function
        self._args = dict(args or {})

    @property
    def name(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    async def run(self, task: Task, client: Client) -> float | None:
        return await self._function(task, client, **self._args)


def as_workflow(candidate: object, args: Mapping[str, Any] | None = None) -> RolloutWorkflow:
    """Return a workflow from a `RolloutWorkflow` instance or class, or from an async function of `(task, client)`.

    `args` are constructor arguments or attributes of a class, or keyword arguments of a function.
    """
    args = args or {}
    if isinstance(candidate, RolloutWorkflow):
        _check_complete(type(candidate))
        return _with_attributes(candidate, args)
    if isinstance(candidate, type):
        if issubclass(candidate, RolloutWorkflow):
            _check_complete(candidate)
            return _construct(candidate, args)
        raise ConfigError(
            f"{candidate.__qualname__} is not a workflow: expected a subclass of agentrl.RolloutWorkflow; "
            "derive it from RolloutWorkflow and implement `async def run(self, task, client) -> float`"
        )
    if inspect.iscoroutinefunction(candidate):
        return _wrap_function(candidate, args)
    kind = "a function without `async`" if inspect.isfunction(candidate) else type(candidate).__name__
    raise ConfigError(
        f"{getattr(candidate, '__qualname__', repr(candidate))} is not a workflow: expected a RolloutWorkflow class or "
        f"instance, or an `async def solve(task, client) -> float`, got {kind}"
    )


def load_workflow(spec: str, args: Mapping[str, Any] | None = None) -> RolloutWorkflow:
    """Return the workflow that `module:Name` names; the module may be in the current directory."""
    module_name, colon, name = spec.partition(":")
    if spec.startswith("<"):
        raise ConfigError(f"workflow: {spec} was a Python object; save it in a module, and set workflow: module:Name")
    if not (module_name and colon and name):
        raise ConfigError(f"workflow: expected module:Name, such as my_agent:Calculator, got {spec!r}")
    module = import_user_module(module_name)
    try:
        candidate = getattr(module, name)
    except AttributeError:
        found = _workflows_in(module)
        hint = f"it has {', '.join(found)}" if found else "it defines no workflow"
        raise ConfigError(f"workflow: module {module_name} has no {name!r}; {hint}") from None
    return as_workflow(candidate, args)


def _workflows_in(module: ModuleType) -> list[str]:
    names: list[str] = []
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        is_class = isinstance(value, type) and issubclass(value, RolloutWorkflow) and not _lacking(value)
        if is_class or _takes_task_and_client(value):
            names.append(name)
    return sorted(names)


def _takes_task_and_client(value: object) -> bool:
    return inspect.iscoroutinefunction(value) and len(inspect.signature(value).parameters) >= 2


def _lacking(kind: type[RolloutWorkflow]) -> list[str]:
    plays = kind.run is not RolloutWorkflow.run or kind.rollout is not RolloutWorkflow.rollout
    return [*([] if plays else ["run"]), *sorted(kind.__abstractmethods__)]


def _check_complete(kind: type[RolloutWorkflow]) -> None:
    if missing := _lacking(kind):
        note = ", or rollout for a token-level workflow" if "run" in missing else ""
        raise ConfigError(f"{kind.__qualname__} is an abstract workflow: it does not implement {', '.join(missing)}{note}")


def _construct(kind: type[RolloutWorkflow], args: Mapping[str, Any]) -> RolloutWorkflow:
    if kind.__init__ is object.__init__:
        return _with_attributes(kind(), args)
    try:
        inspect.signature(kind).bind(**args)
    except TypeError as error:
        raise ConfigError(f"{kind.__qualname__} does not take these arguments: {error}; got {dict(args)}") from None
    with boundary(WorkflowError, f"{kind.__qualname__}(**{dict(args)}), from `workflow` and `workflow_args`,"):
        return kind(**args)


def _with_attributes(workflow: RolloutWorkflow, args: Mapping[str, Any]) -> RolloutWorkflow:
    settable = {name for base in type(workflow).__mro__ for name in (*vars(base), *getattr(base, "__annotations__", {}))}
    public = sorted(n for n in settable if not n.startswith("_") and not callable(getattr(type(workflow), n, None)))
    public.remove("name")
    for name, value in args.items():
        if name not in public:
            raise ConfigError(f"{workflow.name} has no attribute {name!r} to set; it has {', '.join(public)}")
        setattr(workflow, name, value)
    return workflow


def _wrap_function(function: object, args: Mapping[str, Any]) -> RolloutWorkflow:
    typed = cast("WorkflowFunction", function)
    try:
        inspect.signature(typed).bind("task", "client", **args)
    except TypeError as error:
        shape = "async def solve(task, client) -> float"
        raise ConfigError(
            f"{getattr(function, '__qualname__', function)} cannot be called as `{shape}`: {error}; arguments: {dict(args)}"
        ) from None
    return FunctionWorkflow(typed, args)
