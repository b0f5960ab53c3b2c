"""One episode as a file of its own, to send to a colleague: it opens from the disk and needs no network."""

from __future__ import annotations

from pathlib import Path

from agentrl.commands.open_run import Run, open_run
from agentrl.episode.summary import EpisodeSummary
from agentrl.errors import ConfigError
from agentrl_viewer.view.data import RunData
from agentrl_viewer.view.document import document


def write_episode(data: RunData, target: Path, episode_id: str | None = None) -> str:
    """Write the page of one episode to `target`; return the episode's id.

    Args:
        data: of the run.
        target: the file; an existing one is replaced.
        episode_id: None: the best of the newest step.
    """
    chosen = episode_id or best_of_newest_step(open_run(data.path)).episode_id
    # The name of the run alone: its path would tell a colleague about this machine.
    embedded = {"run": {"name": data.name}, "episode": data.episode_fields(chosen)}
    try:
        target.write_text(document(embedded), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {target}: {error.strerror or error}") from error
    return chosen


def best_of_newest_step(run: Run) -> EpisodeSummary:
    """Return the episode with the highest return of the newest step that has one, or the only episode of all."""
    ended = [summary for summary in run.episodes() if summary.episode_return is not None]
    if not ended and len(only := list(run.episodes())) == 1:
        return only[0]
    if not ended:
        raise ConfigError(f"{run.path} has no episode with a return; pass --episode to write one that has none")
    return run.episodes(step=max(summary.step for summary in ended)).best(1)[0]
