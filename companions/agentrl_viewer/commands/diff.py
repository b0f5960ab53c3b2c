"""`agentrl diff`: two runs against each other in the terminal.

Invariant: everything printed is recorded in the two directories; text of a run cannot move the cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from agentrl.commands.open_run import open_run
from agentrl.support.foreign import visible
from agentrl_viewer.runs.comparison import Figure, TaskPair, TaskResult, common_figures, common_tasks, differing_fields

_HEADLINES: Final = {
    *("success_rate", "return_mean", "turns_mean", "output_tokens_mean", "signal_share", "staleness_mean", "tokens_per_s"),
    *("trainer.loss", "trainer.grad_norm", "trainer.entropy", "trainer.kl_behavior_proximal_k3"),
    *("train_steps", "episodes", "sampled_tokens", "trained_tokens", "run_seconds"),
    *("trainer_wait_seconds", "rollout_wait_seconds"),
}
_EVENT_HEADS: Final = {
    "evaluation": "last evaluation",
    "step": "training, mean of the last steps",
    "end": "whole run",
}
_MAX_TASKS: Final = 20
_PURPOSES: Final = {"evaluation": "evaluated", "training": "trained"}


def diff_command(left: Path, right: Path, /, *, all: bool = False) -> None:
    """Compare two runs: the fields of their run files that differ, final figures, and tasks whose success changed.

    Args:
        left: Directory of a run, such as runs/NAME.
        right: Directory of another run.
        all: Print every figure and every task, instead of those that matter most.
    """
    print(describe_difference(left, right, every=all))


def describe_difference(left: Path, right: Path, *, every: bool = False) -> str:
    """Return the fields that differ, the final figures of both runs, and the tasks whose success changed.

    Raises:
        ConfigError: a directory holds no run, or a file of it is not readable.
    """
    runs = open_run(left), open_run(right)
    names = (str(left), str(right))
    fields = [(found.path, found.left or "–", found.right or "–") for found in differing_fields(*runs)]
    blocks = [
        _rows_below("fields that differ", names, fields) if fields else "The run files have the same fields.",
        *_figure_tables(common_figures(*runs), names, every=every),
        *_task_tables(common_tasks(*runs), names, every=every),
    ]
    return visible("\n\n".join(blocks))


def _figure_tables(figures: Sequence[Figure], names: tuple[str, str], *, every: bool) -> Iterator[str]:
    for event, head in _EVENT_HEADS.items():
        wanted = [
            figure
            for figure in figures
            if figure.event == event and (every or event == "evaluation" or figure.key in _HEADLINES)
        ]
        rows = [
            (one.key, _figure_text(one.left), _figure_text(one.right), _figure_text(one.right - one.left, "+"))
            for one in wanted
        ]
        if rows:
            yield _rows_below(head, (*names, "change"), rows)


def _task_tables(pairs: Sequence[TaskPair], names: tuple[str, str], *, every: bool) -> Iterator[str]:
    if not pairs:
        yield "No task was played in both runs."
    for purpose, verb in _PURPOSES.items():
        played = [pair for pair in pairs if pair.purpose == purpose]
        changed = [pair for pair in played if pair.change]
        if not played:
            continue
        better = sum(pair.change > 0 for pair in changed)
        worse = len(changed) - better
        verdict = f"Both runs {verb} {len(played)} tasks; {better} succeed more often and {worse} less in {names[1]}."
        shown = changed if every else changed[:_MAX_TASKS]
        rows = [(pair.task_id, _successes(pair.left), _successes(pair.right), pair.prompt) for pair in shown]
        rest = f"\n... and {len(changed) - len(shown)} more; --all lists them" if len(shown) < len(changed) else ""
        yield verdict + ("\n" + _rows_below("success", (*names, "prompt"), rows) + rest if rows else "")


def _successes(result: TaskResult) -> str:
    return f"{result.succeeded} of {result.finished}"


def _figure_text(value: float, sign: str = "") -> str:
    """Return a number as people read it: at most four digits that count, and whole thousands.

    Example:
        >>> _figure_text(87_081.0), _figure_text(-0.03569, "+"), _figure_text(3.0)
        ('87,081', '-0.03569', '3')
    """
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{sign}.4g}"


def _rows_below(head: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows below a head, each column as wide as its widest cell."""
    lines = [(head, *names), *rows]
    widths = [min(48, max(len(line[at]) for line in lines)) for at in range(len(names) + 1)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
