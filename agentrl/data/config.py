"""The config of the tasks of a run.

Invariant: each source has exactly one place that its tasks come from.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from agentrl.config.base import Config


class SourceConfig(Config):
    """Where tasks come from: files, or a function; and which of them count."""

    path: str | None = None
    """File, folder or `hf://` name of tasks; the `id` field, or else the number of the line or row, names the task."""
    format: Literal["harbor"] | None = None
    """`harbor`: `path` is a task folder of Harbor, or holds such folders; None: files of rows, by their ending."""
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


class TasksConfig(SourceConfig):
    """The training tasks, of one source or of several, and the held-out tasks."""

    sources: tuple[WeightedSource, ...] = ()
    """Several sources of training tasks, each with a weight; replaces `path` and `factory`."""
    eval: SourceConfig | None = None
    """Source of the held-out tasks; None: `eval_path` or `eval_factory_args`."""
    eval_path: str | None = None
    """Short for `eval: {path: ...}` with the `map` of the training tasks; None: no evaluation."""
    eval_factory_args: dict[str, Any] | None = None
    """Short for `eval` with `factory` and `map` of the training tasks and these arguments; None: no evaluation."""
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
        return (WeightedSource(**{name: getattr(self, name) for name in SourceConfig.model_fields}),)

    @property
    def held_out(self) -> SourceConfig | None:
        """The source of the held-out tasks; None: there are none."""
        if self.eval_path is not None:
            return SourceConfig(path=self.eval_path, format=self.format, map=self.map)
        if self.eval_factory_args is not None:
            return SourceConfig(factory=self.factory, factory_args=self.eval_factory_args, map=self.map)
        return self.eval

    @model_validator(mode="after")
    def _one_place(self) -> TasksConfig:
        problem = _several_problem(self) if self.sources else _place_problem(self)
        if problem is None and self.factory is None and self.eval_factory_args is not None:
            problem = "factory_args and eval_factory_args need tasks.factory; set it, or remove them"
        elif problem is None and self.factory is not None and self.eval_path is not None:
            problem = "eval_path needs path; with a factory, set tasks.eval_factory_args instead"
        elif problem is None and self.eval is not None and (self.eval_path or self.eval_factory_args is not None):
            problem = "eval replaces eval_path and eval_factory_args; set only one of them"
        elif problem is None and self.curriculum is None and self.curriculum_args:
            problem = "curriculum_args need tasks.curriculum; set it, or remove them"
        elif problem is None and self.curriculum is not None and self.skip_passes:
            problem = "a curriculum weighs tasks by their results itself; set curriculum or skip_passes, not both"
        if problem is not None:
            raise ValueError(problem)
        return self


def _place_problem(source: SourceConfig) -> str | None:
    if (source.path is None) == (source.factory is None):
        also = ", or tasks.sources" if isinstance(source, TasksConfig) else ""
        return f"expected exactly one of path and factory; set path to a file of tasks, or factory{also}"
    if source.path is None and source.format is not None:
        return "format says what path holds; set path, or remove format"
    if source.factory is None and source.factory_args:
        return "factory_args and eval_factory_args need tasks.factory; set it, or remove them"
    return None


def _several_problem(tasks: TasksConfig) -> str | None:
    moved_fields = [name for name in SourceConfig.model_fields if name in tasks.model_fields_set and getattr(tasks, name)]
    if moved_fields:
        return f"sources replaces {', '.join(moved_fields)}, which each source has of its own; move them there"
    if tasks.eval_path is not None or tasks.eval_factory_args is not None:
        return "with sources, set eval, such as eval: {path: held_out.jsonl}, instead of eval_path and eval_factory_args"
    return None
