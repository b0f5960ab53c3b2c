"""The Python files of the guide to tasks do what the guide says of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.data.config import TasksConfig
from agentrl.data.curriculum import Choice, GroupResult, load_curriculum
from agentrl.data.load import load_training

GUIDE = (Path(__file__).parents[2] / "docs" / "howto" / "tasks.md").read_text()


def test_the_python_files_of_the_guide_work_as_map_factory_and_curriculum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, re.S))
    assert set(files) == {"my_tasks.py", "endless.py", "easy_first.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "train.csv").write_text("prompt,answer,level\n 1 + 1? ,2,1\nno answer,,1\nhard,3,9\n")
    [task] = load_training(TasksConfig(path="train.csv", map="my_tasks:to_task", filter={"level": [1, 2]})).finite
    assert task.data == {"question": "1 + 1?", "answer": "2", "level": 1}
    for factory in ("endless:Sums", "endless:counting"):
        training = load_training(TasksConfig(factory=factory))
        assert training.is_endless
        assert len({task.id for task in training.first(20)}) == 20
    curriculum = load_curriculum("easy_first:easy_first", {"floor": 0.25})
    done = GroupResult(group=0, success=0.75, mean_return=0.75)
    assert list(curriculum([Choice("a", 0, None, ()), Choice("b", 0, None, (done,))])) == [0.25, 0.75]
