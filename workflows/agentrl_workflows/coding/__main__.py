"""Writes coding tasks to files: `python -m agentrl_workflows.coding FOLDER --count 2400 --seed 0`.

The files are `train.jsonl` and `held_out.jsonl`, for `tasks.path` of a run file. It takes about half a minute.
`agentrl validate` plays references, empty replies and constants through the real grader.
"""

from __future__ import annotations

from pathlib import Path

import orjson
from cyclopts import App
from rich.console import Console

from agentrl.commands.running import run_command
from agentrl_workflows.coding.tasks import make_coding_tasks

app = App(name="coding", help="Write programming tasks with hidden tests, at four levels.")


@app.default
def write_coding_tasks(folder: Path, *, count: int = 2400, seed: int = 0) -> None:
    """Write `train.jsonl` and `held_out.jsonl`.

    Args:
        folder: Where the files go.
        count: Tasks of both files together; one in eight is held out.
        seed: Picks the tasks.
    """
    made = make_coding_tasks(count, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, is_held_out in (("train", False), ("held_out", True)):
        tasks = [each.as_task() for each in made if each.is_held_out == is_held_out]
        path = folder / f"{name}.jsonl"
        path.write_bytes(b"".join(orjson.dumps({"id": task.id, **task.data}) + b"\n" for task in tasks))
        Console().print(f"{path}: {len(tasks)} tasks", soft_wrap=True)


if __name__ == "__main__":
    run_command(app)
