"""Draw the data path: from a task to a training step, and the weights back to the servers.

.venv/bin/python -m docs.figures.data_path
"""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from docs.figures.style import ASSETS, ENGINE, INK, QUIET, ROLLOUT, TRAINER, save

WIDTH, HEIGHT = 2.1, 1.0


def main(folder: Path = ASSETS) -> None:
    """Write `data-path.svg` into `folder`."""
    figure, axes = plt.subplots(figsize=(13, 4.6))
    axes.set(xlim=(0, 15.9), ylim=(0, 5.6))
    axes.axis("off")
    _box(axes, 0.1, 4.0, "Task", "a mapping with an id", ROLLOUT)
    _box(axes, 3.2, 4.0, "RolloutWorkflow", "your async code", ROLLOUT)
    _box(axes, 6.3, 4.0, "Client", "an AsyncOpenAI", ROLLOUT)
    _box(axes, 9.4, 4.0, "Token graph", "ids, not texts", ROLLOUT)
    _box(axes, 12.5, 4.0, "Inference servers", "embedded or SGLang", ROLLOUT)
    _box(axes, 3.2, 2.2, "Environment", "tools, rewards", ROLLOUT)
    _box(axes, 9.4, 2.2, "Trajectory", "tokens, versions, rewards", ENGINE)
    _box(axes, 9.4, 0.4, "Group", "episodes of one task", ENGINE)
    _box(axes, 6.3, 0.4, "Buffer", "bounds the staleness", ENGINE)
    _box(axes, 3.2, 0.4, "Trainer", "decoupled PPO", TRAINER)
    _box(axes, 12.5, 0.4, "Weights v+1", "digests, probe prompt", TRAINER)
    _arrow(axes, (2.2, 4.5), (3.2, 4.5))
    _arrow(axes, (5.3, 4.6), (6.3, 4.6), "messages")
    _arrow(axes, (6.3, 4.4), (5.3, 4.4), "completion", below=True)
    _arrow(axes, (8.4, 4.5), (9.4, 4.5))
    _arrow(axes, (11.5, 4.6), (12.5, 4.6), "token ids")
    _arrow(axes, (12.5, 4.4), (11.5, 4.4), "sampled ids", below=True)
    _arrow(axes, (4.25, 4.0), (4.25, 3.2), both=True)
    _arrow(axes, (10.45, 4.0), (10.45, 3.2))
    _arrow(axes, (10.45, 2.2), (10.45, 1.4))
    _arrow(axes, (9.4, 0.9), (8.4, 0.9))
    _arrow(axes, (6.3, 0.9), (5.3, 0.9), "batch")
    _arrow(axes, (4.25, 0.4), (13.55, 0.4), bend=0.1)
    _arrow(axes, (13.55, 1.4), (13.55, 4.0), "pause, swap, continue", at=(13.65, 2.7))
    for x, text, color in ((0.1, "one episode", ROLLOUT), (1.9, "engine", ENGINE), (3.2, "trainer", TRAINER)):
        axes.add_patch(FancyBboxPatch((x, 5.35), 0.22, 0.16, boxstyle="round,pad=0.02", facecolor=color, edgecolor=QUIET))
        axes.text(x + 0.35, 5.43, text, va="center", fontsize=9, color=QUIET)
    save(figure, "data-path", folder)
    plt.close(figure)


def _box(axes: Axes, x: float, y: float, title: str, text: str, color: str) -> None:
    style = "round,pad=0.02,rounding_size=0.12"
    axes.add_patch(FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle=style, facecolor=color, edgecolor=INK, linewidth=1))
    axes.text(x + WIDTH / 2, y + 0.62, title, ha="center", va="center", fontsize=8.5, fontweight="bold", color=INK)
    axes.text(x + WIDTH / 2, y + 0.3, text, ha="center", va="center", fontsize=7.2, color=INK)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    text: str = "",
    *,
    at: tuple[float, float] | None = None,
    below: bool = False,
    both: bool = False,
    bend: float = 0.0,
) -> None:
    style = {
        "arrowstyle": "<->" if both else "->",
        "color": INK,
        "connectionstyle": f"arc3,rad={bend}",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
    if at is not None:
        axes.text(*at, text, ha="left", va="center", fontsize=8, color=QUIET)
    elif text:
        middle = (start[0] + end[0]) / 2
        axes.text(middle, start[1] + (-0.12 if below else 0.12), text, ha="center", va="center", fontsize=6.5, color=QUIET)


if __name__ == "__main__":
    main()
