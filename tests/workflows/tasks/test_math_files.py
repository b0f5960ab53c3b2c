"""Files of math problems become tasks, and a record that cannot be used is named."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from agentrl.data.config import SourceConfig, TasksConfig
from agentrl.data.load import load_tasks
from agentrl.data.source import read_records
from agentrl.errors import ConfigError
from agentrl.types import Task
from agentrl_rewards.extract import boxed
from agentrl_workflows.tasks.math_files import aime_tasks, deepscaler_tasks, gsm8k_tasks, math_tasks

APPLES = {"question": "Ann picks 3 bags of 24 apples. How many?", "answer": "3 * 24 = <<3*24=72>>72 apples.\n#### 72"}
SAVINGS = {"question": "What are 5 tens of 200 dollars?", "answer": "It is $1,000 each.\n#### $10,000"}
HALF = {
    "problem": "What is half of $\\frac{1}{2}$?",
    "level": "Level 2",
    "type": "Algebra",
    "solution": "It is $\\frac{1}{2} \\cdot \\frac{1}{2} = \\boxed{\\frac{1}{4}}$.",
}


def write(path: Path, records: Sequence[Mapping[str, object]]) -> str:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.name.endswith(".json"):
        text = json.dumps(records)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.jsonl.gz"])
def test_gsm8k_answers_are_the_numbers_after_the_mark(tmp_path: Path, name: str) -> None:
    first, second = gsm8k_tasks(write(tmp_path / name, [APPLES, SAVINGS]))
    assert (first.id, first["question"], first["answer"]) == ("gsm8k-train-1", APPLES["question"], "72")
    assert first["reference"] == "3 * 24 = 72 apples.\nThe answer is \\boxed{72}."
    assert second["answer"] == "10000"


def test_math_answers_are_the_boxed_ones_and_levels_can_be_chosen(tmp_path: Path) -> None:
    bare = {**HALF, "level": "Level 5", "solution": "So it is $\\boxed 7$."}
    path = write(tmp_path / "algebra.jsonl", [HALF, bare])
    first, second = math_tasks(path)
    assert (first["answer"], first["level"], first["subject"]) == ("\\frac{1}{4}", 2, "Algebra")
    assert first["reference"] == HALF["solution"]
    assert (second["answer"], boxed(second["reference"])) == ("7", "7")
    assert [task["answer"] for task in math_tasks(path, levels=[5])] == ["7"]
    with pytest.raises(ConfigError, match="no record has one of the levels"):
        math_tasks(path, levels=[3])


def test_math_500_has_an_answer_of_its_own_and_a_name(tmp_path: Path) -> None:
    record = {**HALF, "answer": "0.25", "level": 4, "subject": "Prealgebra", "unique_id": "test/prealgebra/9.json"}
    [task] = math_tasks(write(tmp_path / "test.jsonl", [record]))
    assert (task.id, task["answer"], task["level"]) == ("math-test/prealgebra/9", "0.25", 4)
    assert task["subject"] == "Prealgebra"


def test_a_folder_with_one_file_for_each_problem_is_read_in_order(tmp_path: Path) -> None:
    for place in ("geometry/2.json", "algebra/1.json"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(json.dumps(HALF))
    assert [task.id for task in math_tasks(str(tmp_path))] == ["math-algebra/1", "math-geometry/2"]


@pytest.mark.parametrize(
    "record",
    [
        {"id": 60, "problem": "What is 5 squared?", "solution": "...", "answer": "025", "year": "2024"},
        {"ID": "60", "Year": 1999, "Question": "What is 5 squared?", "Answer": 25.0},
        {"id": "60", "question": "What is 5 squared?", "answer": 25},
    ],
)
def test_aime_files_of_every_shape_are_read(tmp_path: Path, record: Mapping[str, object]) -> None:
    [task] = aime_tasks(write(tmp_path / "aime.jsonl", [record]))
    assert (task.id, task["question"], task["answer"]) == ("aime-60", "What is 5 squared?", "25")
    assert task["reference"] == "The answer is \\boxed{25}."


def test_a_csv_file_is_read_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "aime.csv"
    path.write_text('ID,Year,Problem Number,Question,Answer,Part\n1983-1,1983,1,"What is 2, plus 3?",5,\n')
    [task] = aime_tasks(str(path))
    assert (task.id, task["question"], task["answer"]) == ("aime-1983-1", "What is 2, plus 3?", "5")
    path.write_text("ID,Question\n1,2,3\n")
    with pytest.raises(ConfigError, match=r"aime\.csv:2: expected 2 columns"):
        aime_tasks(str(path))


def test_deepscaler_is_one_json_list_whose_solutions_may_be_empty(tmp_path: Path) -> None:
    records = [{"problem": "1 + 1?", "answer": "2", "solution": ""}, {"problem": "3 / 4?", "answer": "\\frac{3}{4}"}]
    tasks = deepscaler_tasks(write(tmp_path / "deepscaler.json", records))
    assert [(task.id, task["answer"]) for task in tasks] == [
        ("deepscaler-deepscaler-1", "2"),
        ("deepscaler-deepscaler-2", "\\frac{3}{4}"),
    ]


Factory = Callable[[str], list[Task]]


@pytest.mark.parametrize(
    ("factory", "record", "expected"),
    [
        (gsm8k_tasks, {"question": "?"}, "data.jsonl:2: expected text in the field 'answer'; the record has ['question']"),
        (
            gsm8k_tasks,
            {"question": "?", "answer": "72"},
            "data.jsonl:2: 'answer': expected a solution that ends",
        ),
        (gsm8k_tasks, {"question": " ", "answer": "#### 1"}, "data.jsonl:2: 'question': expected text, got ' '"),
        (math_tasks, {"problem": "?", "solution": "It is 5."}, "data.jsonl:2: 'solution': expected a \\boxed answer"),
        (aime_tasks, {"problem": "?", "answer": "1/2"}, "'answer': expected an integer from 0 to 999, got '1/2'"),
        (aime_tasks, {"problem": "?", "answer": True}, "'answer': expected text or a number, got True"),
        (deepscaler_tasks, {"problem": 5, "answer": "5"}, "data.jsonl:2: 'problem': expected text, got 5"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_with_what_to_do(
    tmp_path: Path, factory: Factory, record: Mapping[str, object], expected: str
) -> None:
    good = {"question": "?", "problem": "?", "solution": "\\boxed{1}", "answer": "#### 1"}
    if factory is not gsm8k_tasks:
        good["answer"] = "1"
    path = write(tmp_path / "data.jsonl", [good, record])
    with pytest.raises(ConfigError, match=re.escape(expected)) as error:
        factory(path)
    assert "fix or remove the record" in str(error.value)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", b'{"q": 1}\n{"q"\n', "a.jsonl:2: expected a JSON object, got b'{\"q\"'"),
        ("a.jsonl", b"[1]\n", "a.jsonl:1: expected a JSON object, got list"),
        ("a.jsonl", b"", "no records are left of 0"),
        ("a.json", b"[1]", "a.json: record 1: expected a JSON object, got int"),
        ("a.json", b"[{]", "a.json: expected a list of records as JSON"),
        ("a.txt", b"", "expected a file of .jsonl, .json, .csv, .tsv, .parquet, got .txt"),
        ("a.jsonl.gz", b"no gzip", "cannot read"),
        ("a.csv", b"q\n\xff\n", "expected CSV with a header, in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read_records(str(tmp_path / name))


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.jsonl: there is no such file"):
        read_records(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="holds no file of"):
        read_records(str(tmp_path))


def test_a_parquet_file_is_read_with_pyarrow_and_the_error_without_it_says_how_to_get_it(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"train\.parquet: expected parquet"):
        gsm8k_tasks(str(path))


def test_start_and_count_cut_one_file_into_two_sets(tmp_path: Path) -> None:
    path = write(tmp_path / "all.jsonl", [APPLES] * 5)
    assert [task.id for task in gsm8k_tasks(path, count=2)] == ["gsm8k-all-1", "gsm8k-all-2"]
    assert [task.id for task in gsm8k_tasks(path, start=3)] == ["gsm8k-all-4", "gsm8k-all-5"]
    with pytest.raises(ConfigError, match="no records are left of 5 with start=5"):
        gsm8k_tasks(path, start=5)
    with pytest.raises(ConfigError, match="count of at least 1"):
        gsm8k_tasks(path, count=0)


def test_a_run_file_names_the_mapping_and_an_error_in_the_data_reaches_the_user_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [APPLES, SAVINGS])
    factory = "agentrl_workflows.tasks.math_files:gsm8k_tasks"
    sets = load_tasks(
        TasksConfig(
            factory=factory,
            factory_args={"path": path, "start": 1},
            eval=SourceConfig(factory=factory, factory_args={"path": path, "count": 1}),
        )
    )
    assert [task.id for task in (*sets.train.finite, *sets.evaluation)] == ["gsm8k-train-2", "gsm8k-train-1"]
    write(tmp_path / "train.jsonl", [{"question": "?"}])
    with pytest.raises(ConfigError, match=r"^tasks\.factory: .*train\.jsonl:1: expected text .*the record$"):
        load_tasks(TasksConfig(factory=factory, factory_args={"path": path}))
