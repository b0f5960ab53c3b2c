"""A run, read from its directory: `run = agentrl.open_run("runs/demo")`.

Invariant: nothing is written, and nothing is kept: each call reads the files as they are, also while the run writes them.
Work that was lost when a process was killed is left out. Token ids become text only by a tokenizer with the vocabulary of
the run's model: that of its newest checkpoint, else of `model.path`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tokenizers import Tokenizer

from agentrl.episode.codec import stored_trajectory
from agentrl.episode.show import EpisodeView, html_of, print_view, view_of
from agentrl.episode.summary import EpisodeSummary, Purpose, TrainedEpisode
from agentrl.episode.trajectory import Task, Trajectory
from agentrl.errors import ConfigError
from agentrl.observe.runs.plot import plot_curves
from agentrl.observe.runs.reading import read_index, read_metrics, read_record, read_record_lines, read_trained_lines
from agentrl.observe.runs.table import EpisodeTable, MetricLines
from agentrl.observe.timeline import Activity, read_timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from agentrl.config import RunConfig

_TOKENIZER_FILE = "tokenizer.json"
_TRAINED = msgspec.json.Decoder(TrainedEpisode)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisode:
    """An episode of a run with everything that is recorded of it."""

    summary: EpisodeSummary
    """Its line in the index."""
    trajectory: Trajectory
    """Its turns; `trajectory.task` has the task."""
    read_trained: Callable[[], TrainedEpisode | None]
    read_texts: Callable[[Sequence[int]], list[str] | None]

    @property
    def task(self) -> Task | None:
        """The task; None where only its id was recorded."""
        return self.trajectory.task

    @property
    def trained(self) -> TrainedEpisode | None:
        """The advantages and proximal log-probs of its turns; None for an episode that no step has trained."""
        return self.read_trained()

    def token_texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each of `ids`; None: no tokenizer of the run is found. ConfigError: it cannot be read."""
        return self.read_texts(ids)

    def show(self, tokens: bool = False) -> None:
        """Print the episode to the terminal, with the advantages that were trained; `tokens` prints each token, too."""
        print_view(self._view(tokens))

    def _repr_html_(self) -> str:
        return html_of(self._view(tokens=True))

    def _view(self, tokens: bool) -> EpisodeView:
        trained = self.trained
        advantages = None if trained is None else [turn.advantage for turn in trained.turns]
        return view_of(self.trajectory, tokens=tokens, texts=self.token_texts, advantages=advantages)


class TokenTexts:
    """The tokenizer of a run: looked for at each use until one is found, as a run writes its first checkpoint late."""

    def __init__(self, run_dir: Path, model_path: Callable[[], str | None]) -> None:
        self._run_dir = run_dir
        self._model_path = model_path
        self._loaded: Tokenizer | None = None

    def __call__(self, ids: Sequence[int]) -> list[str] | None:
        """Return one text for each id; None where there is no tokenizer. Part of a character beyond ASCII is U+FFFD.

        Raises:
            ConfigError: the tokenizer cannot be read.
        """
        self._loaded = self._loaded or self._load()
        if self._loaded is None:
            return None
        return self._loaded.decode_batch([[int(number)] for number in ids], skip_special_tokens=False)

    def _load(self) -> Tokenizer | None:
        file = self._file()
        if file is None:
            return None
        try:
            return Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the tokenizer {file}: {error.strerror}") from error
        except Exception as error:
            raise ConfigError(f"{file} is not a tokenizer: {error}") from error

    def _file(self) -> Path | None:
        checkpoints = sorted(self._run_dir.glob(f"checkpoints/step-*/{_TOKENIZER_FILE}"))
        if checkpoints:
            return checkpoints[-1]
        model = self._model_path()
        file = None if model is None else Path(model) / _TOKENIZER_FILE
        return file if file is not None and file.is_file() else None


def open_run(path: str | Path) -> Run:
    """Return the run whose directory is `path`, such as `runs/demo`; raises ConfigError where there is none."""
    folder = Path(path)
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(f"{folder} is no run directory: expected a directory with metrics.jsonl, such as runs/NAME")
    return Run(folder)


class Run:
    """The files of a run.

    Example:
        run = agentrl.open_run("runs/demo")
        for summary in run.episodes(step=7).worst(3):
            run.episode(summary.episode_id).trajectory.show()
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.resolve().name

    @property
    def config(self) -> RunConfig | None:
        """The run file with its defaults; None where there is none. ConfigError: this release does not accept it."""
        from agentrl.config import load_config  # with the openai package, which readers of episodes do not need

        file = self.path / "config.yaml"
        return load_config(file) if file.is_file() else None

    def metrics(self, event: str | None = None) -> MetricLines:
        """Return the lines of `metrics.jsonl` in order, those of one event (`step`, `evaluation`, ...) if given."""
        return MetricLines(line for line in read_metrics(self.path) if event is None or line["event"] == event)

    def timeline(self) -> list[Activity]:
        """Return who worked and who waited when, in the order in which the activities ended."""
        return list(read_timeline(self.path))

    def episodes(self, step: int | None = None, purpose: Purpose | None = None) -> EpisodeTable:
        """Return the finished attempts, in the order in which they ended.

        `step` is the training step that was the next to complete when the episode ended; None: all steps.
        """
        return EpisodeTable([row for row in read_index(self.path) if _wanted(row, step, purpose)])

    def episode(self, episode_id: str) -> StoredEpisode:
        """Return one episode; raises ConfigError where the run has no such episode, or its record was pruned."""
        for row in read_index(self.path):
            if row.episode_id == episode_id:
                return self._stored(row, read_record(self.path, row), self.token_texts())
        raise ConfigError(f"{self.path} has no episode {episode_id!r}; run.episodes() lists those that have ended")

    def read_episodes(self, step: int | None = None, purpose: Purpose | None = None) -> Iterator[StoredEpisode]:
        """Yield episodes one at a time, without those whose records were pruned; the arguments are those of `episodes`."""
        texts = self.token_texts()
        for found in read_record_lines(self.path, self.episodes(step, purpose)):
            yield self._stored(found.summary, found.record, texts)

    def plot(self) -> Figure:
        """Return a matplotlib figure of returns, success, staleness and evaluations by step."""
        return plot_curves(self.metrics("step"), self.metrics("evaluation"), title=self.name)

    def _stored(self, row: EpisodeSummary, record: bytes, texts: TokenTexts) -> StoredEpisode:
        return StoredEpisode(
            summary=row,
            trajectory=stored_trajectory(record),
            read_trained=lambda: self._trained(row),
            read_texts=texts,
        )

    def _trained(self, row: EpisodeSummary) -> TrainedEpisode | None:
        for event in read_metrics(self.path):
            if event["event"] == "step" and row.group in event["trained_groups"]:
                return self._trained_in(event["step"], row.episode_id)
        return None

    def _trained_in(self, step: int, episode_id: str) -> TrainedEpisode | None:
        lines = map(_TRAINED.decode, read_trained_lines(self.path, step))
        return next((found for found in lines if found.episode_id == episode_id), None)

    def token_texts(self) -> TokenTexts:
        """Return the writer of token ids as text; it loads the tokenizer of the run at its first use."""

        def model_path() -> str | None:
            try:
                config = self.config
            except ConfigError:  # of another release: the episodes are shown without their tokens' text
                return None
            return None if config is None else config.model.path

        return TokenTexts(self.path, model_path)


def _wanted(row: EpisodeSummary, step: int | None, purpose: Purpose | None) -> bool:
    return (step is None or row.step == step) and (purpose is None or row.purpose == purpose)
