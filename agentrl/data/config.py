"""The config of the tasks of a run.

Invariant: each source has exactly one place that its tasks come from.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Final, Literal, cast

from pydantic import Field, PrivateAttr, model_validator

from agentrl.config.base import Config


class SourceConfig(Config):
    """Where tasks come from: files, or a function; and which of them count."""

    path: str | None = None
    """File, folder or `hf://` name of tasks; the `id` field, or else the number of the line or row, names the task."""
    format: Literal["harbor"] | None = None
    """`harbor`: `path` is a task folder of Harbor, or holds such folders; None: files of rows, by their ending."""
    unreadable: Literal["refuse", "skip"] = "refuse"
    """What becomes of task folders of `format` that cannot be read or that the workflow refuses: `refuse` ends the run
    before it starts and counts the reasons; `skip` leaves them out, and the plan, `agentrl validate` and
    `left_out_tasks.jsonl` name them."""
    factory: str | None = None
    """`module:function` that returns the tasks when called with `factory_args`; replaces `path`."""
    factory_args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of `factory`."""
    map: str | None = None
    """`module:function` from a row to a Task, to the fields of one, or to None, which leaves the row out."""
    filter: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Values of fields of the tasks that are kept, such as `{level: [1, 2]}`: one value, or a list of them."""
    limit: int | None = Field(default=None, ge=1)
    """Number of tasks that are kept, from the first; None: all of them."""

    _workflow_args: Mapping[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @property
    def workflow_args(self) -> Mapping[str, Any]:
        """The arguments of the workflow that plays the tasks, which a format may look at; empty outside of a run."""
        return self._workflow_args

    def play_with(self, workflow_args: Mapping[str, Any]) -> None:
        """Take note of the arguments of the workflow; a run does so once it is read."""
        self._workflow_args = workflow_args

    @property
    def origin(self) -> str:
        """The path, or the name of the factory."""
        return self.path or self.factory or ""

    @model_validator(mode="after")
    def _one_place(self) -> SourceConfig:
        problem = _place_problem(self)
        if problem is not None:
            raise ValueError(problem)
        return self


class WeightedSource(SourceConfig):
    """One of several sources."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the groups that this source gets, relative to the weights of the others."""


FORMER_SPELLINGS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "eval_path": ("path", ("format", "map")),
    "eval_factory_args": ("factory_args", ("factory", "map")),
}
"""What named the held-out tasks until version 0.2: the field of `eval`, and the fields that came from the training tasks."""


class TasksConfig(SourceConfig):
    """The training tasks, of one source or of several, and the held-out tasks."""

    sources: tuple[WeightedSource, ...] = ()
    """Several sources of training tasks, each with a weight; replaces `path` and `factory`."""
    eval: SourceConfig | None = None
    """The held-out tasks; without `path` and `factory` they come from `factory` and `map` of the training tasks."""
    shuffle: bool = True
    """Whether each pass over the training tasks has an order of its own; false keeps theirs, such as from easy to hard."""
    curriculum: str | None = None
    """`module:Class` or `module:function` that weighs tasks by their results; None draws each once in a pass."""
    curriculum_args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Keyword arguments of `curriculum`."""

    skip_passes: int = Field(default=0, ge=0, le=100)
    """Passes that a task sits out after a group whose episodes all succeeded, or all failed, with equal returns; 0: none."""

    @property
    def training(self) -> tuple[WeightedSource, ...]:
        """The sources of the training tasks."""
        if self.sources:
            return self.sources
        own = WeightedSource(**{name: getattr(self, name) for name in SourceConfig.model_fields})
        own.play_with(self.workflow_args)
        return (own,)

    @property
    def skips_unreadable(self) -> bool:
        """Whether tasks of any source are left out where they cannot be used."""
        sources = (*self.training, *([self.eval] if self.eval else []))
        return any(source.unreadable == "skip" for source in sources)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_held_out(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        fields = _without_former_spellings(cast("Mapping[str, object]", given))
        held_out = fields.get("eval")
        if isinstance(held_out, Mapping) and not {"path", "factory"} & {name for name, value in held_out.items() if value}:
            held_out = cast("Mapping[str, object]", held_out)
            fields["eval"] = {**{name: fields[name] for name in ("factory", "map") if fields.get(name)}, **held_out}
        return fields

    @model_validator(mode="after")
    def _one_place(self) -> TasksConfig:
        problem = _several_problem(self) if self.sources else _place_problem(self)
        if problem is None and self.curriculum is None and self.curriculum_args:
            problem = "curriculum_args need tasks.curriculum; set it, or remove them"
        elif problem is None and self.curriculum is not None and self.skip_passes:
            problem = "a curriculum weighs tasks by their results itself; set curriculum or skip_passes, not both"
        if problem is not None:
            raise ValueError(problem)
        return self


def _without_former_spellings(given: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of tasks with `eval` in the place of what named the held-out tasks before."""
    fields = {name: value for name, value in given.items() if name not in FORMER_SPELLINGS}
    for former, (name, taken) in FORMER_SPELLINGS.items():
        if given.get(former) is None:
            continue
        if fields.get("eval") is not None:
            raise ValueError(f"eval replaces {former}, and only one can count; set eval.{name}, and remove {former}")
        if fields.get("sources") or fields.get(taken[0] if name == "factory_args" else "path") is None:
            raise ValueError(f"{former} does not say enough here; set eval, such as eval: {{path: held_out.jsonl}}")
        fields["eval"] = {**{each: fields[each] for each in taken if fields.get(each)}, name: given[former]}
        said = f"tasks.{former} is tasks.eval.{name} now; write eval: {fields['eval']!r:.200}"
        warnings.warn(said, FutureWarning, stacklevel=2)
    return fields


def _place_problem(source: SourceConfig) -> str | None:
    if (source.path is None) == (source.factory is None):
        also = ", or tasks.sources" if isinstance(source, TasksConfig) else ""
        return f"expected exactly one of path and factory; set path to a file of tasks, or factory{also}"
    if source.path is None and source.format is not None:
        return "format says what path holds; set path, or remove format"
    if source.format is None and source.unreadable == "skip":
        of = f"{source.factory} leaves out what it wants to" if source.factory else "rows of files are never skipped"
        return f"unreadable: skip leaves out task folders, and needs format: harbor; {of}; remove unreadable"
    if source.factory is None and source.factory_args:
        return "factory_args need factory; set it, or remove them"
    return None


def _several_problem(tasks: TasksConfig) -> str | None:
    fields = SourceConfig.model_fields.items()
    given = [name for name, field in fields if getattr(tasks, name) != field.get_default(call_default_factory=True)]
    if given:
        return f"sources replaces {', '.join(given)}, which each source has of its own; move them there"
    return None
