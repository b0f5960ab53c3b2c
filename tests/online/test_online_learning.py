"""An online run with the embedded server and the real trainer: feedback raises what it rewards."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.error import URLError

import pytest
import yaml

from tests.engine.harness import lines
from tests.online.clients import asked, posted
from tests.support.cli import AGENTRL, END_S, agentrl, read_until, started

STEPS, BATCH = 40, 16


def letters(text: str) -> float:
    """Return the share of a text that is Latin letters, as a user who likes them."""
    return sum(each.isascii() and each.isalpha() for each in text) / max(1, len(text))


@pytest.mark.starts
@pytest.mark.nightly
def test_feedback_of_users_raises_what_they_like(tmp_path: Path, checkpoint: Path) -> None:
    run = {
        "name": "live",
        "model": {"path": str(checkpoint)},
        "sampling": {"max_tokens": 8},
        "inference": {"device": "cpu", "max_context_tokens": 256, "max_running_requests": 16},
        "algorithm": {"group_size": BATCH // 2, "groups_per_step": 2, "staleness_policy": "drop", "max_staleness": 4},
        "trainer": {"device": "cpu", "lr": 3e-3},
        "engine": {"steps": STEPS},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    key = agentrl(tmp_path, "online", "run.yaml", "--keys", "keys.txt", "--new-key", "web").stdout.strip()
    assert key not in (tmp_path / "keys.txt").read_text()
    flags = ("--keys", "keys.txt", "--port", "0", "--requests-per-minute", "100000")
    with started(tmp_path, AGENTRL, "online", "run.yaml", *flags) as process:
        url = read_until(process, "serving the policy at").rpartition("serving the policy at ")[2].split("/v1")[0]
        asked_for = 0
        while process.poll() is None and asked_for < 3 * STEPS * BATCH:
            try:
                text, name = asked(url, key, f"Say {asked_for % 7}.")
                posted(f"{url}/feedback", key, {"reward": letters(text), "conversation_id": name})
            except (URLError, ConnectionError):
                break  # the run has done its steps
            asked_for += 1
        _, errors = process.communicate(timeout=END_S)
        assert process.returncode == 0, errors
    returns = [line["return_mean"] for line in lines(tmp_path / "runs" / "live" / "metrics.jsonl", "step")]
    assert len(returns) == STEPS
    assert sum(returns[-4:]) / 4 > sum(returns[:4]) / 4 + 0.2
    audited = agentrl(tmp_path, "audit", "runs/live")
    assert audited.returncode == 0, audited.stderr
    assert json.loads((tmp_path / "runs" / "live" / "summary.json").read_text())["error"] is None
