"""The curves of a run as a matplotlib figure: return, success, staleness and evaluations, by training step.

Invariant: a curve shows the recorded values and nothing between them but a line. Each evaluation names the policy versions
that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANELS = (("return", ("return_mean",)), ("success", ("success_rate",)), ("staleness", ("staleness_mean", "staleness_max")))
"""The title of each panel and the keys of its curves; evaluations have the first two as well."""


def plot_curves(steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]], *, title: str) -> Figure:
    """Return the figure of the `step` and `evaluation` events; `figure.savefig("curve.png")` writes it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("run.plot needs matplotlib; install it with: pip install 'agentrl[plot]'") from None
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    figure.suptitle(title)
    for place, (name, keys) in enumerate(_PANELS, start=1):
        axes = figure.add_subplot(1, len(_PANELS), place)
        for key in keys:
            _draw(axes, steps, key, f"training: {key}", "-")
            _draw(axes, evaluations, key, f"evaluation: {key}", "o--")
        axes.set(title=name, xlabel="training step")
        if axes.lines:
            axes.legend()
    return figure


def _draw(axes: Axes, events: Sequence[Mapping[str, Any]], key: str, label: str, style: str) -> None:
    points = [(event["step"], event[key]) for event in events if event.get(key) is not None]
    if points:
        axes.plot([step for step, _ in points], [value for _, value in points], style, label=label)
    for event in events:
        if event.get(key) is not None and event.get("min_version") is not None:
            place = (event["step"], event[key])
            axes.annotate(_versions(event), place, xytext=(0, 5), textcoords="offset points", fontsize="x-small")


def _versions(evaluation: Mapping[str, Any]) -> str:
    lowest, highest = evaluation["min_version"], evaluation["max_version"]
    return f"v{lowest}" if lowest == highest else f"v{lowest}-{highest}"
