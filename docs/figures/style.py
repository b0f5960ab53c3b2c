"""Colors and the way in which the figures of the documentation are saved."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

ASSETS = Path(__file__).parents[1] / "assets"
INK = "#1f2430"
QUIET = "#6b7280"
ROLLOUT = "#dbeafe"
ENGINE = "#fef3c7"
TRAINER = "#dcfce7"
VERSIONS = ("#60a5fa", "#34d399", "#fbbf24", "#f472b6", "#a78bfa", "#fb923c", "#22d3ee", "#a3e635")
"""The colors of successive policy versions."""


def save(figure: Figure, name: str, folder: Path = ASSETS) -> None:
    """Write `name`.svg into `folder`: the same bytes each time with one version of matplotlib, on a white ground."""
    mpl.rcParams["svg.hashsalt"] = name
    figure.savefig(folder / f"{name}.svg", facecolor="white", bbox_inches="tight", metadata={"Date": None})
