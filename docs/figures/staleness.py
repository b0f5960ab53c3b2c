"""Draw the final success of each arm of the staleness benchmark over the lag of its data.

.venv/bin/python -m docs.figures.staleness        (reads benchmarks/results/staleness.json)
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any, TypeAlias

from matplotlib import pyplot as plt

from docs.figures.style import ASSETS, INK, QUIET, VERSIONS, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "staleness.json"
Row: TypeAlias = dict[str, Any]
NAMES = {
    "naive": "PPO around the sampler",
    "decoupled": "decoupled, cap 5",
    "none": "decoupled, no correction",
    "tis": "decoupled, cut at 2",
    "dppo_tv": "DPPO-TV",
    "guard": "decoupled, guarded rate",
    "anchored": "anchored",
}


def demo_rows(runs: list[Row]) -> list[Row]:
    """Return the demo's runs as rows like the small policies': one for each arm, lag and rate with several runs."""
    cells: dict[tuple[float, str, int], list[float]] = {}
    for run in runs:
        cells.setdefault((float(run["rate"]), str(run["arm"]), int(run["lag"])), []).append(float(run["success"]))
    return [
        {
            **{"policy": "demo", "rate": rate, "arm": arm, "lag": lag, "success": statistics.fmean(values)},
            "half_interval": 1.96 * statistics.stdev(values) / math.sqrt(len(values)),
        }
        for (rate, arm, lag), values in sorted(cells.items())
        if len(values) > 1
    ]


def draw(folder: Path = ASSETS) -> None:
    """Write staleness.svg into `folder`: a panel for each policy, with one minibatch a step, the demo, and learning rate."""
    results = json.loads(RESULTS.read_text())
    rows: list[Row] = [row for row in results["rows"] if row["minibatches"] == 1] + demo_rows(results["demo"]["rows"])
    shown = sorted({(str(row["policy"]), float(row["rate"])) for row in rows}, key=lambda each: (each[0] != "demo", each))
    figure, grid = plt.subplots(1, len(shown), figsize=(15, 3.2), sharey=True, squeeze=False)
    for axes, (policy, rate) in zip(grid[0], shown, strict=True):
        for color, (name, label) in zip(VERSIONS, NAMES.items(), strict=False):
            line = [row for row in rows if (row["policy"], row["rate"], row["arm"]) == (policy, rate, name)]
            lags, middle, half = ([row[key] for row in line] for key in ("lag", "success", "half_interval"))
            axes.errorbar(lags, middle, yerr=half, color=color, label=label, marker="o", markersize=3, capsize=2)
        axes.set_title(f"{policy}, learning rate {rate:g}", color=INK, fontsize=9)
        axes.set_xlabel("lag of the data, steps", color=QUIET, fontsize=8)
        axes.set_ylim(0, 1.03)
        axes.tick_params(labelsize=8, colors=QUIET)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("final success", color=QUIET, fontsize=8)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=8, frameon=False)
    figure.subplots_adjust(bottom=0.3, wspace=0.08)
    save(figure, "staleness", folder)


if __name__ == "__main__":
    draw()
