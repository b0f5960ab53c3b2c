"""Folders that the real `datasets` package saved are read like any file."""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.data.config import TasksConfig
from agentrl.data.load import load_training
from agentrl.errors import ConfigError

pytestmark = pytest.mark.external
ROWS = [{"question": f"{number} + 1?", "answer": str(number + 1), "tags": ["a", "b"]} for number in range(300)]


def ends_with_zero(row: Mapping[str, object]) -> bool:
    return str(row["answer"]).endswith("0")


def load(folder: Path) -> list[dict[str, object]]:
    return [dict(task.data) for task in load_training(TasksConfig(path=str(folder))).finite]


def test_a_saved_data_set_a_filtered_one_and_one_of_several_files(tmp_path: Path) -> None:
    from datasets import Dataset

    saved: Any = Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "whole"))
    saved.save_to_disk(str(tmp_path / "several"), num_shards=3)
    saved.filter(ends_with_zero).save_to_disk(str(tmp_path / "filtered"))

    assert load(tmp_path / "whole") == ROWS
    assert load(tmp_path / "several") == ROWS
    assert load(tmp_path / "filtered") == [row for row in ROWS if ends_with_zero(row)]


def test_of_several_splits_one_must_be_named(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    DatasetDict({"train": Dataset.from_list(ROWS[:200]), "test": Dataset.from_list(ROWS[200:])}).save_to_disk(str(tmp_path))
    with pytest.raises(ConfigError, match="holds the splits train, test; name one"):
        load(tmp_path)
    assert load(tmp_path / "test") == ROWS[200:]
