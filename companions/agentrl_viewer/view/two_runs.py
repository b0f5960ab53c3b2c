"""Two runs against each other, as the page reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from agentrl.commands.open_run import Run
from agentrl_viewer.runs.comparison import TaskResult, common_figures, common_tasks, differing_fields
from agentrl_viewer.view.metric_names import describe_metric


def comparison_json(left: Path, right: Path) -> bytes:
    """Return `fields`, `figures` and `tasks` of two runs, as `agentrl_viewer.runs.comparison` has them."""
    runs = Run(left), Run(right)
    figures = [
        {**figure._asdict(), **describe_metric(figure.key, figure.event)._asdict()} for figure in common_figures(*runs)
    ]
    tasks = [
        {**pair._asdict(), "change": pair.change, "left": _result_json(pair.left), "right": _result_json(pair.right)}
        for pair in common_tasks(*runs)
    ]
    return orjson.dumps(
        {"fields": [field._asdict() for field in differing_fields(*runs)], "figures": figures, "tasks": tasks}
    )


def _result_json(result: TaskResult) -> dict[str, Any]:
    return {**result._asdict(), "success_rate": result.success_rate}
