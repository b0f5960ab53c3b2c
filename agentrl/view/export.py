"""One episode as a file of its own, to send to a colleague: it opens from the disk and needs no network."""

from __future__ import annotations

from pathlib import Path

from agentrl.episode.summary import EpisodeSummary
from agentrl.errors import ConfigError
from agentrl.runs.run import Run, open_run
from agentrl.view.document import document
from agentrl.view.episode import episode_json


def write_episode(run_dir: Path, target: Path, episode_id: str | None = None) -> str:
    """Write the page of one episode to `target`; return the episode's id.

    Args:
        run_dir: directory of a run.
        target: the file; an existing one is replaced.
        episode_id: None: the best of the newest step.
    """
    run = open_run(run_dir)
    chosen = episode_id or best_of_newest_step(run).episode_id
    # The name of the run alone: its path would tell a colleague about this machine.
    embedded = {"run": {"name": run.name}, "episode": episode_json(run.episode(chosen), run.token_texts())}
    try:
        target.write_text(document(embedded), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: cannot write {target}: {error.strerror or error}") from error
    return chosen


def best_of_newest_step(run: Run) -> EpisodeSummary:
    """Return the episode with the highest return of the newest step that has one."""
    ended = [summary for summary in run.episodes() if summary.episode_return is not None]
    if not ended:
        raise ConfigError(f"{run.path} has no episode with a return; pass --episode to write one that failed")
    return run.episodes(step=max(summary.step for summary in ended)).best(1)[0]
