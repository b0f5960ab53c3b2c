"""What one variant of a demo is: its run file, the model that it begins with, and its amounts.

Invariant: a recipe counts steps and episodes, never seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSplit:
    """Episodes apart by whether they recorded a metric above 0; both success rates go into the table and the summary."""

    metric: str
    field: str
    """Last part of the names in the summary: `sampled_after_without_and_with_<field>`."""
    without: str
    """Label of the episodes without it."""
    having: str
    """Label of the episodes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRecipe(ABC):
    """One variant of a demo; a subclass says which model training begins with."""

    title: str
    """Of the learning curve."""
    package: str
    """It holds `demo.yaml`: the run, in which the demo fills in name, seed, `tasks.factory_args.seed` and model.path."""
    start: str
    """What the model is before training, such as `warm start`."""
    limit_argument: str
    """Workflow argument that bounds an episode; evaluations vary it."""
    limit_unit: str
    """What it counts, such as `turn`."""
    limits_before: tuple[int, ...]
    """Its values in the evaluation before training; the last and largest is the run file's."""
    limits_after: tuple[int, ...]
    """Its values in the evaluation of the trained weights."""
    split: EpisodeSplit | None = None
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels by metric of the episodes; its means go into the table and the summary (`<metric>_before` and `_after`)."""
    next_run: str = ""
    """A run file that trains further on the warm start; the demo ends with its command. Empty: there is none."""
    eval_episodes: int = 512
    """Held-out episodes of each evaluation."""
    eval_servers: int = 1
    """Servers that an evaluation asks; training has those of the run file."""
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the run that differ from the run file, by dotted name."""

    @property
    def run_file(self) -> str:
        """Path of demo.yaml."""
        return str(files(self.package).joinpath("demo.yaml"))

    def settings(self) -> Mapping[str, object]:
        """Return the overrides, and what depends on this machine."""
        return self.overrides

    @abstractmethod
    def model_path(self, folder: Path) -> Path:
        """Return the place of the model in a run whose directory is `folder`; the model need not be there yet."""

    def fetch(self, console: Console) -> None:  # noqa: B027 - most demos make their model themselves
        """Bring what the model is made from to this machine, before anything of an earlier run goes; nothing by default."""

    @abstractmethod
    def make_model(self, folder: Path, seed: int, console: Console) -> Path:
        """Make the model if it is not there, and return the directory that servers load."""
