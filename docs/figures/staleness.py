"""Draw the final success of each arm of the staleness benchmark over the lag of its data.

.venv/bin/python -m docs.figures.staleness        (reads benchmarks/results/staleness.json)
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import pyplot as plt

from docs.figures.style import ASSETS, INK, QUIET, VERSIONS, save

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "staleness.json"
NAMES = {
    "naive": "PPO around the sampler",
    "decoupled": "decoupled, cap 5",
    "none": "decoupled, no correction",
    "tis": "decoupled, cut at 2",
    "dppo_tv": "DPPO-TV",
    "guard": "decoupled, guarded rate",
}


def draw(folder: Path = ASSETS) -> None:
    """Write staleness.svg into `folder`: one panel for each policy and learning rate, with one minibatch a step."""
    rows = [row for row in json.loads(RESULTS.read_text())["rows"] if row["minibatches"] == 1]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    rates = sorted({row["rate"] for row in rows})
    figure, grid = plt.subplots(1, len(policies) * len(rates), figsize=(11, 3.2), sharey=True, squeeze=False)
    panels = iter(grid[0])
    for policy in policies:
        for rate in rates:
            axes = next(panels)
            for color, (name, label) in zip(VERSIONS, NAMES.items(), strict=False):
                line = [row for row in rows if (row["policy"], row["rate"], row["arm"]) == (policy, rate, name)]
                lags = [row["lag"] for row in line]
                middle = [row["success"] for row in line]
                half = [row["half_interval"] for row in line]
                axes.errorbar(lags, middle, yerr=half, color=color, label=label, marker="o", markersize=3, capsize=2)
            axes.set_title(f"{policy}, learning rate {rate}", color=INK, fontsize=9)
            axes.set_xlabel("lag of the data, steps", color=QUIET, fontsize=8)
            axes.tick_params(labelsize=8, colors=QUIET)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("final success", color=QUIET, fontsize=8)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=8, frameon=False)
    figure.subplots_adjust(bottom=0.3, wspace=0.08)
    save(figure, "staleness", folder)


if __name__ == "__main__":
    draw()
