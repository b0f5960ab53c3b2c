"""The checkpoint a run goes on from.

Invariant: a run goes on only as the run it was: what decides the order of its tasks or the shape of its batches is as it was
when it began, and the checkpoint is whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, cast

import yaml

from agentrl.config import RunConfig
from agentrl.engine.resume import RunState
from agentrl.errors import ConfigError, TrainError
from agentrl.launch.plan import resolved_yaml
from agentrl.train.checkpoint import latest_checkpoint

_FIXED = (
    ("seed",),
    ("model", "path"),
    ("workflow",),
    ("tasks",),
    ("algorithm", "group_size"),
    ("algorithm", "groups_per_step"),
)
"""Fields a run cannot change when it goes on; others, such as `engine.steps` and `trainer.lr`, may be set anew."""


class ResumePoint(NamedTuple):
    """A whole checkpoint and where its run stood."""

    path: Path
    state: RunState


def find_checkpoint(run: RunConfig) -> ResumePoint:
    """Return the newest sound checkpoint of `run`.

    Raises:
        ConfigError: there is none, none is sound, or the run was another one.
    """
    root = run.run_dir / "checkpoints"
    if not root.is_dir():
        raise ConfigError(
            f"--resume: {root} does not exist; there is no run named {run.name!r} with a checkpoint to go on from"
        )
    _check_same(run)
    try:
        found = latest_checkpoint(root)
        if found is None:
            raise ConfigError(f"--resume: {root} holds no checkpoint; start anew with --replace")
        state = RunState.from_note(found.note, where=str(found.path))
    except TrainError as error:
        raise ConfigError(f"--resume: {error}") from error
    if state.step >= run.engine.steps:
        raise ConfigError(
            f"--resume: {found.path} has {state.step} of {run.engine.steps} steps done; raise --engine.steps to train on"
        )
    return ResumePoint(found.path, state)


def _check_same(run: RunConfig) -> None:
    file = run.run_dir / "config.yaml"
    try:
        before: object = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--resume: cannot read how the run was configured from {file}: {error}") from error
    now: object = yaml.safe_load(resolved_yaml(run))
    for path in _FIXED:
        was, wanted = _at(before, path), _at(now, path)
        if was != wanted:
            raise ConfigError(
                f"--resume: {'.'.join(path)} was {was!r} and is now {wanted!r}; a run goes on with what it began with. "
                "Set it back, or start another run with --name"
            )


def _at(tree: object, path: tuple[str, ...]) -> object:
    for key in path:
        tree = cast("dict[str, object]", tree).get(key) if isinstance(tree, dict) else None
    return tree
