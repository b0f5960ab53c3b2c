"""The real wandb, offline, writes what the tracker hands it."""
# The package is optional and its types are not ours: what it returns is checked at run time.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalOperand=false
# pyright: reportOperatorIssue=false, reportUnhashable=false, reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.observe.trackers.to_wandb import WandbTracker, wandb_mode
from tests.observe.trackers.scene import HOSTILE, track


def test_nothing_is_sent_without_a_key(tmp_path: Path) -> None:
    logins = tmp_path / "netrc"
    logins.write_text("machine api.wandb.ai login user password secret\n")
    logins.chmod(0o600)
    assert wandb_mode({"NETRC": str(tmp_path / "none")}) == "offline"
    assert wandb_mode({"NETRC": str(logins)}) == "online"
    assert wandb_mode({"NETRC": str(logins), "WANDB_BASE_URL": "https://wandb.example.org"}) == "offline"
    assert wandb_mode({"NETRC": str(logins), "WANDB_MODE": "offline"}) == "offline"


def records(file: Path) -> Iterator[Any]:
    """Yield the records of a `.wandb` file: a LevelDB log of protocol buffers behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


def history(file: Path) -> list[dict[str, Any]]:
    """Return the lines that were logged, with dotted names for nested keys."""
    logged = [record.history.item for record in records(file) if record.WhichOneof("record_type") == "history"]
    return [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items} for items in logged]


@pytest.mark.external
def test_curves_tables_and_a_resumed_run_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    track(WandbTracker(), tmp_path)
    track(WandbTracker(), tmp_path, resumed_step=3)
    first, second = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    assert first.name == second.name == f"run-{(tmp_path / 'wandb-id.txt').read_text()}.wandb", "the same run"
    logged = [*history(first), *history(second)]
    rates = [(line["step"], line["train/success_rate"]) for line in logged if "train/success_rate" in line]
    assert rates == [(step, step / 8) for step in range(1, 7)]
    assert [line["step"] for line in logged if "eval/success_rate" in line] == [3, 6]
    [opened] = [record.run for record in records(first) if record.WhichOneof("record_type") == "run"]
    config = {item.key: json.loads(item.value_json) for item in opened.config.update}
    assert (opened.project, opened.display_name, config["trainer"]) == ("the-project", tmp_path.name, {"lr": 1e-5})
    tables = sorted(tmp_path.glob("wandb/*/files/media/table/episodes/evaluation_*.table.json"))
    rows = [json.loads(table.read_text())["data"] for table in tables]
    assert {(row[0], row[1]) for some in rows for row in some} == {(3, "best"), (3, "worst"), (6, "best"), (6, "worst")}
    assert HOSTILE.splitlines()[1] in rows[0][0][-1]
    assert "tracker" not in caplog.text
    assert capfd.readouterr() == ("", "")
