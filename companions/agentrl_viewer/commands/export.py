"""`agentrl export`: the stored episodes of a run in the format of other programs.

Invariant: nothing in the run is changed. A file of an earlier export of the same episode is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

import orjson

from agentrl.commands.open_run import Run, open_run
from agentrl.commands.running import check_writable
from agentrl.episode.summary import EpisodeSummary, Purpose
from agentrl.errors import ConfigError, RunStopped
from agentrl.observe.runs.reading import RecordedLine, read_record_lines
from agentrl.processes.watchdog.signals import interrupt_note
from agentrl.support.folders import make_private
from agentrl_viewer.exchange.atif_write import atif_document

ExportFormat: TypeAlias = Literal["atif"]


class _Origin(NamedTuple):
    """What a document says of the run that it comes from."""

    agent: str
    model: str | None
    run: str


def export_command(
    run: Path,
    /,
    *,
    format: ExportFormat = "atif",
    output: Path | None = None,
    episode: str | None = None,
    step: int | None = None,
    purpose: Purpose | None = None,
    limit: int | None = None,
) -> None:
    """Write the stored episodes of a run in the format of other programs: one ATIF document an episode.

    Args:
        run: Directory of the run, such as runs/demo; nothing in it is changed.
        format: atif is the Agent Trajectory Interchange Format 1.7, with token ids, log-probs and policy versions.
        output: Directory to write the files to; the default is RUN-FORMAT in the current directory.
        episode: Only this episode.
        step: Only the episodes that ended before this training step was complete.
        purpose: Only episodes of training, or of evaluation.
        limit: At most so many episodes.
    """
    folder = output or Path(f"{run.resolve().name}-{format}")
    with interrupt_note(lambda: f"The files that are written stay in {folder}; run the command again to replace them."):
        written = export_run(run, folder, episode=episode, step=step, purpose=purpose, limit=limit)
    print(f"wrote {written} episodes of {run} to {folder}")


def export_run(
    path: Path,
    folder: Path,
    *,
    episode: str | None = None,
    step: int | None = None,
    purpose: Purpose | None = None,
    limit: int | None = None,
) -> int:
    """Write one ATIF file an episode; return how many.

    Raises:
        ConfigError: there is no run, it has no such episodes, or `folder` cannot be written.
        RunStopped: a file cannot be written.
    """
    run = open_run(path)
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit}: expected at least 1")
    if folder.resolve().is_relative_to(run.path.resolve()):
        raise ConfigError(f"--output {folder} is inside the run, which is left as it is; name another place")
    check_writable(folder / "episode", f"--output {folder}")
    wanted = run.episodes(step, purpose).where(_keeps_episode(episode))
    origin = _origin(run)
    written = 0
    for found in islice(read_record_lines(run.path, wanted), limit):
        _write_file(folder, found, origin)
        written += 1
    if not written:
        which = "" if episode is None else f" {episode!r}"
        raise ConfigError(f"{path} has no stored episode{which} of those that the command asks for; nothing is written")
    return written


def _keeps_episode(episode: str | None) -> Callable[[EpisodeSummary], bool]:
    return lambda row: episode is None or row.episode_id == episode


def _origin(run: Run) -> _Origin:
    """Return the workflow and the model of a run, without the paths of this machine."""
    try:
        config = run.config
    except ConfigError:  # of another release: the episodes can be read all the same
        config = None
    if config is None:
        return _Origin("agentrl", None, run.name)
    return _Origin(config.workflow, Path(config.model.path).name, run.name)


def _write_file(folder: Path, found: RecordedLine, origin: _Origin) -> None:
    record: dict[str, Any] = orjson.loads(found.record)
    text = atif_document(record, agent=origin.agent, model=origin.model, run=origin.run)
    file = folder / f"{quote(found.summary.episode_id, safe='')}.json"
    try:
        make_private(folder)
        file.write_bytes(text)
    except OSError as error:
        raise RunStopped(f"cannot write {file}: {error.strerror}; the files before it are whole") from error
