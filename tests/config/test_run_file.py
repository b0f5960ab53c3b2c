"""A run file and the flags beside it are read the same way, and what is wrong with the text is one message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config import RunConfig, load_config, parse_config, parse_overrides
from agentrl.config.describe import config_fields
from agentrl.errors import ConfigError
from tests.support.cli import status_here

BASE = "workflow: my:Agent\ntasks: {path: t.jsonl}\nmodel: {path: m}\n"


def load(folder: Path, text: str | bytes, *flags: str) -> RunConfig:
    file = folder / "run.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(file, flags)


@pytest.mark.parametrize("text", [BASE.encode() + b"name: \xff\n", BASE.encode("utf-16"), BASE.encode() + b"name: \x00\n"])
def test_a_file_that_is_not_utf8_is_a_config_error(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml is not YAML in UTF-8: "):
        load(tmp_path, text)


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_command_says_so_with_status_two_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "run.yaml").write_bytes(b"name: \xff\n")
    status = status_here(command, str(tmp_path / "run.yaml"))
    out, said = capsys.readouterr()
    assert "run.yaml is not YAML in UTF-8" in out + said
    assert "Traceback" not in said
    assert status == (2 if command == "train" else 1)  # the doctor makes its other checks and counts what it found


def test_text_outside_ascii_is_read_whatever_the_locale(tmp_path: Path) -> None:
    assert load(tmp_path, BASE + "runs_dir: läufe\n").runs_dir == "läufe"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer: {lr: 1.0e-3}\ntrainer: {dtype: float32}\n", "the key 'trainer' is given twice"),
        ("seed: 1\nseed: 2\n", "the key 'seed' is given twice"),
        ("trainer:\n  lr: 1.0e-3\n  'lr': 1.0e-3\n", "the key 'lr' is given twice"),
    ],
)
def test_a_key_given_twice_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    line = 4 + text.count("\n") - 1
    with pytest.raises(ConfigError, match=f"(?s){expected}.*line {line}, column"):
        load(tmp_path, BASE + text)


def test_a_key_may_replace_one_that_is_merged_in(tmp_path: Path) -> None:
    text = BASE + "trainer: &t {lr: 1.0e-3, threads: 2}\nworkflow_args: {a: {m: &m {<<: *t, lr: 5}}, b: {<<: *m, lr: 6}}\n"
    assert load(tmp_path, text).workflow_args == {"a": {"m": {"lr": 5, "threads": 2}}, "b": {"lr": 6, "threads": 2}}


@pytest.mark.parametrize("text", ["name: 2026-13-45\n", "name: " + "[" * 5000, "seed: " + "9" * 5000 + "\n"])
def test_text_that_breaks_the_reader_is_a_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="is not YAML in UTF-8"):
        load(tmp_path, BASE + text)
    assert parse_overrides(["--name", text[6:].strip()]) == [("name", text[6:].strip())]


def test_what_contains_itself_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)is not YAML in UTF-8.*recursive.*line \d+, column"):
        load(tmp_path, BASE + "workflow_args: &a {a: {b: [*a]}}\n")
    assert parse_overrides(["--workflow_args", "&a [*a]"]) == [("workflow_args", "&a [*a]")]


@pytest.mark.parametrize("value", ["1e5", "0123", "1.50", "try-2", "1_000", "'7'"])
def test_a_flag_is_read_as_the_same_text_in_the_file(tmp_path: Path, value: str) -> None:
    assert load(tmp_path, BASE, "--name", value).name == load(tmp_path, BASE + f"name: {value}\n").name


@pytest.mark.parametrize(
    ("path", "word"),
    [(field.path, word) for field in config_fields(RunConfig) for word in re.findall(r"\b(?:off|on|yes|no)\b", field.type)],
)
def test_a_word_that_older_yaml_takes_for_a_boolean_is_a_value_of_its_field(tmp_path: Path, path: str, word: str) -> None:
    for text in (word, f"'{word}'", f'"{word}"'):
        assert dict(parse_overrides([f"--{path}", text])) == {path: word}
    section, name = path.split(".")
    assert getattr(getattr(load(tmp_path, f"{BASE}{section}: {{{name}: {word}}}\n"), section), name) == word


def test_words_for_yes_and_no_are_booleans_where_a_field_is_one(tmp_path: Path) -> None:
    for word, value in {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}.items():
        run = load(tmp_path, BASE, "--trainer.gradient_checkpointing", word)
        assert run.trainer.gradient_checkpointing is value


def test_a_number_without_a_point_is_a_number_where_one_is_expected(tmp_path: Path) -> None:
    assert load(tmp_path, BASE, "--trainer.lr", "1e-5", "--name", "1e5").trainer.lr == 1e-5
    assert load(tmp_path, BASE + "trainer: {lr: 1e-5}\n").trainer.lr == 1e-5


@pytest.mark.parametrize(
    "url",
    ["foo", "", "http://", "http://a b:1", "ftp://x", "http://x:99999", "localhost:30000", "127.0.0.1:30000", "http://[::1"],
)
@pytest.mark.parametrize("sync", ["auto", "disk"])
def test_an_address_that_is_none_is_blamed_on_the_urls(tmp_path: Path, url: str, sync: str) -> None:
    expected = f"inference.urls: expected base URLs such as http://10.0.0.7:30000, got {url!r}"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load(tmp_path, BASE + f"sync: {sync}\ninference: {{urls: ['{url}']}}\n")


def test_addresses_are_kept_without_the_slash_at_their_end() -> None:
    given = ("http://127.0.0.1:1/", "https://LocalHost", "http://[::1]:30000", "http://127.0.0.1:2/proxy/")
    run = parse_config(
        {"workflow": "my:Agent", "tasks": {"path": "t"}, "model": {"path": "m"}, "inference": {"urls": given}}
    )
    urls = ("http://127.0.0.1:1", "https://localhost", "http://[::1]:30000", "http://127.0.0.1:2/proxy")
    assert run.inference.urls == urls


def test_a_value_that_looks_like_a_flag_is_told_to_go_after_an_equals_sign(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"such as --inference\.sglang_args=1; a value that starts with -- needs the = too"
    ):
        load(tmp_path, BASE, "--inference.sglang_args", "--foo")
    run = load(tmp_path, BASE, "--inference.backend", "sglang", "--inference.sglang_args=--foo")
    assert run.inference.sglang_args == ("--foo",)
