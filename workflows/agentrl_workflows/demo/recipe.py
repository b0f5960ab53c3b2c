"""What one variant of a demo is: its run file, its student, its demonstrations and its amounts.

Invariant: a recipe counts steps and episodes, never seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path


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
    """One variant of a demo; a subclass says how to write the student and its demonstrations."""

    title: str
    """Of the learning curve."""
    package: str
    """It holds `demo.yaml`: the run, in which the demo fills in name, seed, `tasks.factory_args.seed` and model.path."""
    limit_argument: str
    """Workflow argument that bounds an episode; evaluations vary it."""
    limit_unit: str
    """What it counts, such as `turn`."""
    limits_before: tuple[int, ...]
    """Its values in the evaluation of the warm start; the last and largest is the run file's."""
    limits_after: tuple[int, ...]
    """Its values in the evaluation of the trained weights."""
    split: EpisodeSplit | None = None
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels by metric of the episodes; its means go into the table and the summary (`<metric>_before` and `_after`)."""
    num_demonstrations: int
    sft_steps: int
    sft_conversations: int = 24
    """Conversations of one warm-start step."""
    sft_lr: float = 5e-3
    """AdamW: embeddings and norms."""
    sft_muon_lr: float = 0.02
    """Muon: matrices."""
    sft_threads: int = 1
    device: str = "cpu"
    next_run: str = ""
    """A run file that trains further on the warm start; the demo ends with its command. Empty: there is none."""
    eval_episodes: int = 512
    """Held-out episodes of each evaluation."""
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    """Settings of the run that differ from the run file, by dotted name."""

    @property
    def run_file(self) -> str:
        """Path of demo.yaml."""
        return str(files(self.package).joinpath("demo.yaml"))

    @abstractmethod
    def write_student(self, folder: Path, seed: int) -> None:
        """Write a tokenizer and a model with random weights to `folder`, which does not exist yet."""

    @abstractmethod
    def write_demonstrations(self, path: Path, seed: int) -> None:
        """Write `num_demonstrations` conversations on training tasks to `path`, one `{"messages": [...]}` a line."""
