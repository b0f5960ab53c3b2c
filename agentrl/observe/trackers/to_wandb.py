"""`track: [wandb]`: a run of Weights & Biases, offline unless the user has logged in.

Invariant: nothing is sent unless `WANDB_MODE` asks for it, or there is an API key (`WANDB_API_KEY`, or `wandb login`). A
resumed run continues the same run of the service.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

from agentrl.episode.summary import Purpose
from agentrl.observe.trackers.base import RunStatus, SampledEpisode, TrackedRun, Tracker

_COLUMNS = ("step", "choice", "task", "episode", "return", "success", "text")


class WandbTracker(Tracker):
    """Logs metrics against `step`, and episodes as tables; files go to `wandb/` of the run directory."""

    def start(self, run: TrackedRun) -> None:
        """Open the run, under the id that an earlier process chose."""
        mode = wandb_mode(os.environ)
        if mode != "online":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read at the import: it sends reports of crashes
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb  # pyright: ignore[reportMissingImports]

        file = run.run_dir / "wandb-id.txt"
        if not file.is_file():
            file.write_text(uuid4().hex[:12])
        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=file.read_text().strip(),
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
            mode=mode,  # pyright: ignore - the package declares a literal
            settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
        )
        self._run.define_metric("step")
        for group in ("train", "eval", "episodes"):
            self._run.define_metric(f"{group}/*", step_metric="step")

    def step(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Log `train/KEY`."""
        self._log("train", step, wall_s, numbers)

    def evaluation(self, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        """Log `eval/KEY`."""
        self._log("eval", step, wall_s, numbers)

    def episodes(self, step: int, purpose: Purpose, samples: Sequence[SampledEpisode]) -> None:
        """Log a table `episodes/PURPOSE`."""
        table = self._table(columns=list(_COLUMNS))
        for one in samples:
            table.add_data(step, one.choice, one.task_id, one.episode_id, one.episode_return, one.success, one.text)
        self._run.log({f"episodes/{purpose}": table, "step": step})

    def finish(self, status: RunStatus) -> None:
        """Close the run; a status other than finished marks it as failed."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)

    def _log(self, group: str, step: int, wall_s: float, numbers: Mapping[str, float]) -> None:
        self._run.log({f"{group}/{key}": value for key, value in numbers.items()} | {"step": step, "wall_s": wall_s})


def wandb_mode(environment: Mapping[str, str]) -> str:
    """Return `WANDB_MODE` where it is set; otherwise `online` if there is an API key, and `offline` if there is none.

    Example:
        >>> wandb_mode({"WANDB_MODE": "disabled"}), wandb_mode({"WANDB_API_KEY": "k"}), wandb_mode({"NETRC": "/no/file"})
        ('disabled', 'online', 'offline')
    """
    if mode := environment.get("WANDB_MODE"):
        return mode
    if environment.get("WANDB_API_KEY"):
        return "online"
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        known = netrc(environment.get("NETRC", str(Path.home() / ".netrc"))).hosts
    except (OSError, NetrcParseError):
        return "offline"
    return "online" if host in known else "offline"
