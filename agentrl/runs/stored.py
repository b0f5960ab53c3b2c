"""One episode from the files of a run.

Invariant: its trajectory has the tokens, log-probs, versions, messages and rewards that were recorded, exactly; times are
seconds on the run's clock, and `prompt_digest` is not stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.episode.show import EpisodeView, html_of, print_view, view_of
from agentrl.episode.summary import EpisodeSummary, TrainedEpisode
from agentrl.episode.trajectory import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEpisode:
    """An episode of a run with everything that is recorded of it."""

    summary: EpisodeSummary
    """Its line in the index."""
    trajectory: Trajectory
    """Its turns; `trajectory.task` has the task."""
    read_trained: Callable[[], TrainedEpisode | None]
    """Reads what `trained` returns."""
    read_texts: Callable[[Sequence[int]], list[str] | None]
    """Reads what `token_texts` returns."""

    @property
    def task(self) -> Task | None:
        """The task; None where only its id was recorded."""
        return self.trajectory.task

    @property
    def trained(self) -> TrainedEpisode | None:
        """The advantages and proximal log-probs of its turns; None for an episode that no step has trained."""
        return self.read_trained()

    def token_texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each of `ids`; None where no tokenizer of the run is found.

        Raises:
            ConfigError: the tokenizer of the run cannot be read.
        """
        return self.read_texts(ids)

    def show(self, tokens: bool = False) -> None:
        """Print the episode to the terminal, with the advantages that were trained; `tokens` prints each token, too."""
        print_view(self._view(tokens))

    def _repr_html_(self) -> str:
        """Return the episode as a notebook shows it, with every token."""
        return html_of(self._view(tokens=True))

    def _view(self, tokens: bool) -> EpisodeView:
        trained = self.trained
        advantages = None if trained is None else [turn.advantage for turn in trained.turns]
        return view_of(self.trajectory, tokens=tokens, texts=self.token_texts, advantages=advantages)
