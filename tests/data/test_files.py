"""Every kind of data file gives the same rows, and a file or a row that cannot be read is named."""

from __future__ import annotations

import codecs
import gzip
import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.data.config import TasksConfig
from agentrl.data.files import read_rows
from agentrl.data.load import given_tasks, load_training, read_tasks, write_task_files
from agentrl.data.source import DataRecord, read_records
from agentrl.errors import ConfigError

ROWS = [{"id": "a", "question": "1, 2?", "answer": "3"}, {"id": "b", "question": 'Tab\tor "quote"?', "answer": "é"}]


def save_dataset(folder: Path, shards: Sequence[Sequence[dict[str, Any]]]) -> Path:
    """Write a folder as `datasets.Dataset.save_to_disk` does."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pa.Table.from_pylist(list(rows))
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": None}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_rows(path: Path) -> Path:
    """Write `ROWS` as the name of the file asks for."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
        return path
    if kind == "saved":
        return save_dataset(path, [ROWS[:1], ROWS[1:]])
    quoted = [['"' + value.replace('"', '""') + '"' for value in row.values()] for row in ROWS]
    separator = "\t" if kind == "tsv" else ","
    text = {
        "jsonl": "".join(json.dumps(row) + "\n\n" for row in ROWS),
        "json": json.dumps(ROWS),
        "csv": (table := "\n".join(separator.join(row) for row in [["id", "question", "answer"], *quoted])),
        "tsv": table,
    }[kind].encode()
    path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
    return path


@pytest.mark.parametrize(
    "name",
    ["t.jsonl", "t.jsonl.gz", "t.json", "t.json.gz", "t.csv", "t.csv.gz", "t.tsv", "t.tsv.gz", "t.parquet", "t.saved"],
)
def test_every_kind_of_file_gives_the_same_tasks(tmp_path: Path, name: str) -> None:
    file = write_rows(tmp_path / name)
    assert [dict(row.fields) for row in read_rows(file)] == ROWS
    assert [task.id for task in load_training(TasksConfig(path=str(file))).finite] == ["a", "b"]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.jsonl.gz", "t.json.gz", "t.csv", "t.tsv"])
def test_a_byte_order_mark_at_the_start_of_a_file_is_no_text(tmp_path: Path, name: str) -> None:
    file = write_rows(tmp_path / name)
    data = file.read_bytes()
    is_packed = name.endswith(".gz")
    marked = codecs.BOM_UTF8 + (gzip.decompress(data) if is_packed else data)
    file.write_bytes(gzip.compress(marked) if is_packed else marked)
    assert [dict(row.fields) for row in read_rows(file)] == ROWS


def test_json_lines_that_were_joined_from_marked_files_are_read(tmp_path: Path) -> None:
    mark = codecs.BOM_UTF8
    (tmp_path / "t.jsonl").write_bytes(mark + b'{"a": 1}\n' + mark + b'{"a": 2}\n' + mark)
    assert [row.fields["a"] for row in read_rows(tmp_path / "t.jsonl")] == [1, 2]


LARGE = [2**64, 2**64 + 1, -(2**63) - 1, 2**100, math.factorial(25), 10**400, 3]


@pytest.mark.parametrize("name", ["t.jsonl", "t.json", "t.saved.json"])
def test_integers_of_any_size_are_exact(tmp_path: Path, name: str) -> None:
    rows = [{"answer": number, "nested": {"list": [number]}} for number in LARGE]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_text(lines if name.endswith(".jsonl") else json.dumps(rows))
    assert [dict(row.fields) for row in read_rows(tmp_path / name)] == rows
    tasks = load_training(TasksConfig(path=str(tmp_path / name))).finite
    assert [task["answer"] for task in tasks] == LARGE
    write_task_files(tmp_path, tasks, ())
    assert [task.data for task in read_tasks(tmp_path / "tasks.jsonl")] == rows
    assert [record.answer("answer") for record in read_records(str(tmp_path / name))] == list(map(str, LARGE))


@pytest.mark.parametrize("number", ["1e400", "1" * 5_000])
def test_a_number_that_cannot_be_exact_is_an_error_that_names_the_line(tmp_path: Path, number: str) -> None:
    (tmp_path / "t.jsonl").write_text('{"answer": 1}\n{"answer": ' + number + "}\n")
    with pytest.raises(ConfigError, match=r"t.jsonl:2: expected a JSON object"):
        list(read_rows(tmp_path / "t.jsonl"))


def test_large_integers_in_fields_of_text_and_in_given_tasks_are_exact(tmp_path: Path) -> None:
    record = DataRecord({"tests": f"[{2**100}]"}, place="t:1", name="1")
    assert record.listed("tests") == [2**100]
    tasks = given_tasks([{"id": "a", "answer": 2**100, "ids": np.arange(3)}], "tasks")
    write_task_files(tmp_path, tasks, ())
    assert [task["answer"] for task in read_tasks(tmp_path / "tasks.jsonl")] == [2**100]


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (1e23, "100000000000000000000000"),
        (5.0, "5"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (Decimal("12345678901234567890.00"), "12345678901234567890"),
        (Decimal("0.10"), "0.10"),
    ],
)
def test_a_number_as_an_answer_keeps_its_digits(value: object, answer: str) -> None:
    assert DataRecord({"answer": value}, place="t:1", name="1").answer("answer") == answer


@pytest.mark.parametrize("value", [math.nan, math.inf, True, [1]])
def test_what_is_no_number_is_no_answer(value: object) -> None:
    with pytest.raises(ConfigError, match=r"t:1: 'answer': expected text or a"):
        DataRecord({"answer": value}, place="t:1", name="1").answer("answer")


def test_a_folder_and_a_pattern_name_several_files_in_order(tmp_path: Path) -> None:
    for name in ("train-2.jsonl", "train-10.jsonl", "sub/test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"q": 1}\n{"q": 2}\n')
    pattern = load_training(TasksConfig(path=f"{tmp_path}/train-*.jsonl")).finite
    assert [task.id for task in pattern] == ["train-10-1", "train-10-2", "train-2-1", "train-2-2"]
    assert len(load_training(TasksConfig(path=str(tmp_path))).finite) == 6
    with pytest.raises(ConfigError, match="no file fits this pattern"):
        load_training(TasksConfig(path=f"{tmp_path}/*.csv"))


def test_the_error_for_a_folder_of_splits_lists_them(tmp_path: Path) -> None:
    save_dataset(tmp_path / "saved" / "train", [ROWS])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"holds the splits train, test; name one, such as .*saved/train"):
        load_training(TasksConfig(path=str(tmp_path / "saved")))
    assert len(load_training(TasksConfig(path=str(tmp_path / "saved" / "train"))).finite) == 2


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.parquet", b"PAR1 and no more", "a.parquet: expected parquet"),
        ("a.tsv", b"q\ta\n1\n", "a.tsv:2: expected 2 columns"),
        ("a.csv", b"q\n\xff\n", "expected CSV with a header, in UTF-8"),
        ("a.json", b"[{]", "a.json: expected a list of records as JSON"),
        ("a.csv", b"q,a,q\n1,2,3\n", "a.csv: the header names 'q' more than once"),
        ("a.jsonl.gz", b"no gzip", "cannot read"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 30, "cannot read"),
        ("a.parquet.gz", b"", "got no ending"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        list(read_rows(tmp_path / name))


def test_a_saved_folder_that_is_broken_is_named(tmp_path: Path) -> None:
    folder = save_dataset(tmp_path / "saved", [ROWS])
    (folder / "data-00000-of-00001.arrow").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"data-00000-of-00001.arrow: expected an Arrow stream"):
        list(read_rows(folder))
    (folder / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"state.json: expected a JSON object"):
        list(read_rows(folder))


def test_a_large_file_is_read_as_far_as_the_limit_asks(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"q": 1}\n{"q": 2}\nthis line is never read\n')
    assert len(load_training(TasksConfig(path=str(file), limit=2)).finite) == 2


def test_files_that_differ_before_their_kind_have_tasks_of_their_own(tmp_path: Path) -> None:
    for name in ("part.0.jsonl", "part.1.jsonl.gz", ".cache/part.2.jsonl", ".hidden.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data = b'{"q": 1}\n'
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = load_training(TasksConfig(path=str(tmp_path))).finite
    assert [task.id for task in found] == ["part.0-1", "part.1-1"]


def test_a_folder_with_a_saved_data_set_names_it(tmp_path: Path) -> None:
    save_dataset(tmp_path / "all" / "saved", [ROWS])
    with pytest.raises(ConfigError, match=r"the sub-folder .*all/saved is a data set that `datasets` saved; name it itself"):
        load_training(TasksConfig(path=str(tmp_path / "all")))


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "expected a list `_data_files`, as datasets writes it, got NoneType"),
        ({"_data_files": {}}, "expected a list `_data_files`, as datasets writes it, got dict"),
        (
            {"_data_files": [{}]},
            "file 1 of `_data_files`: expected a `filename` in this folder, .* got None; save the data set",
        ),
        ({"_data_files": ["a.arrow"]}, "file 1 of `_data_files`: expected a `filename`"),
        ({"_data_files": [{"filename": 3}]}, "got 3; save the data set again"),
        ({"_data_files": [{"filename": "../a.arrow"}]}, "expected a `filename` in this folder, .* got '../a.arrow'"),
        ({"_data_files": [{"filename": "a.arrow"}]}, "a.arrow: expected an Arrow stream"),
    ],
)
def test_a_saved_data_set_whose_state_is_broken_is_an_error_that_names_it(tmp_path: Path, state: object, why: str) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=why):
        list(read_rows(tmp_path))


@pytest.mark.parametrize("splits", [{"splits": 3}, {}, {"splits": [1, 2]}])
def test_the_splits_of_a_broken_saved_data_set_are_an_error_all_the_same(tmp_path: Path, splits: object) -> None:
    (tmp_path / "dataset_dict.json").write_text(json.dumps(splits))
    with pytest.raises(ConfigError, match=r"this folder holds the splits .*; name one"):
        list(read_rows(tmp_path))
