"""The trackers that a run file names.

Invariant: a package that is missing and a class that is no tracker are errors before anything starts. Only the trackers that
the run file names are imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple, cast

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.resuming import last_wall_s
from agentrl.observe.trackers.base import TrackedRun, Tracker
from agentrl.observe.trackers.feed import TrackerFeed
from agentrl.support.user_code import import_user_module
from agentrl.tokens.renderer import Renderer


class _Bundled(NamedTuple):
    module: str
    """Below `agentrl.observe.trackers`."""
    kind: str
    package: str | None
    """The package that the extra of the tracker's name installs; None: none is needed."""


BUNDLED: Mapping[str, _Bundled] = {
    "tensorboard": _Bundled("to_tensorboard", "TensorBoardTracker", "tensorboard"),
    "wandb": _Bundled("to_wandb", "WandbTracker", "wandb"),
    "mlflow": _Bundled("to_mlflow", "MlflowTracker", "mlflow"),
    "opentelemetry": _Bundled("to_opentelemetry", "OpenTelemetryTracker", "opentelemetry.sdk"),
    "jsonl": _Bundled("to_jsonl", "JsonlTracker", None),
}
"""The trackers that a run file may name without a module."""


def load_trackers(run: RunConfig) -> dict[str, Tracker]:
    """Return new trackers by the names in `run.track`.

    Raises:
        ConfigError: a name is not known, its package is not installed, or a class of the user is no tracker.
    """
    return {name: _load(name) for name in run.track}


def _load(name: str) -> Tracker:
    bundled = BUNDLED.get(name)
    if bundled is None:
        return _load_own(name)
    if bundled.package is not None and not _is_installed(bundled.package):
        raise ConfigError(
            f"track: {name} needs the package {bundled.package}, which is not installed; "
            f"pip install 'agentrl[{name}]', or remove {name} from track"
        )
    module = import_user_module(f"agentrl.observe.trackers.{bundled.module}", "track")
    return cast("Tracker", getattr(module, bundled.kind)())


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that should hold it is missing
        return False


def _load_own(name: str) -> Tracker:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"track: expected {', '.join(BUNDLED)} or module:Class, got {name!r}")
    kind: object = getattr(import_user_module(module, "track"), attribute, None)
    if not (isinstance(kind, type) and issubclass(kind, Tracker)):
        raise ConfigError(
            f"track: {name} is not a tracker: expected a class that derives from agentrl.observe.trackers.base.Tracker"
        )
    try:
        return kind()
    except ConfigError:  # it names what is wrong
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"track: {name}() raised {type(error).__name__}: {error}; a tracker takes no arguments") from error


def make_feed(run: RunConfig, trackers: Mapping[str, Tracker], renderer: Renderer, resumed_step: int) -> TrackerFeed | None:
    """Return the feed of a run's trackers, where the run continues after `resumed_step` steps; None: it has no trackers."""
    if not trackers:
        return None
    clock_s = last_wall_s(run.run_dir) if resumed_step else 0.0
    described = TrackedRun(
        name=run.name,
        run_dir=run.run_dir,
        project=run.track_project,
        config=run.model_dump(mode="json"),
        resumed_step=resumed_step,
        began_at=time.time() - clock_s,
    )
    return TrackerFeed(trackers, described, samples=run.track_samples, decode=partial(renderer.decode, skip_special=False))
