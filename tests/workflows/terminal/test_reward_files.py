"""Reward files mean what they mean to Harbor; what is no reward is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl_workflows.terminal.reward_files import read_reward
from tests.support.harbor_package import HARBOR_PYTHON, asked_of_harbor

PAID: dict[str, tuple[bytes | None, bytes | None, float]] = {
    "a number": (b" 0.5\n", None, 0.5),
    "a whole number": (b"1", None, 1.0),
    "a small number": (b"1e-3", None, 0.001),
    "named": (None, b'{"reward": 0.75, "style": 0.5}', 0.75),
    "true": (None, b'{"reward": true}', 1.0),
    "false": (None, b'{"reward": false, "score": 1}', 0.0),
    "named, beside an empty text": (b"", b'{"reward": 1}', 1.0),
    "named, beside the same number": (b"1", b'{"reward": 1.0}', 1.0),
}
"""What Harbor pays as well: `reward.txt`, `reward.json`, and the reward."""
ALSO_PAID: dict[str, tuple[bytes | None, bytes | None, float]] = {
    "a bare number": (None, b"0.25", 0.25),
    "a bare boolean": (None, b"true", 1.0),
    "a number beside an empty structure": (b"1", b"", 1.0),
    "a number beside remarks": (b"1", b'{"status": "pass"}', 1.0),
    "a number beside counts": (b"1", b'{"passed": 28, "total": 28}', 1.0),
    "a score": (None, b'{"score": 1, "passed": 28, "total": 28, "status": "pass", "failed": []}', 1.0),
    "an accuracy": (b"\n", b'{"accuracy": 0.5, "total": 28}', 0.5),
    "a score and an accuracy": (None, b'{"accuracy": 0.5, "score": 0.25}', 0.25),
    "an accuracy beside a score that is nothing": (None, b'{"score": null, "accuracy": 0.5}', 0.5),
    "a number beside a score": (b"0", b'{"score": 1}', 0.0),
    "a number beside a score that is a text": (b"1", b'{"score": "28/28"}', 1.0),
}
"""What Harbor has no reward for, though the files name one."""
UNPAID: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "nothing": (None, None, "no number"),
    "an empty text": (b"", None, "no number"),
    "white space": (b"\n", None, "no number"),
    "empty files": (b"", b" ", "no number"),
    "two numbers": (b"1 1", None, "expected a number, got '1 1'"),
    "a word": (b"true", None, "expected a number, got 'true'"),
    "no number": (b"nan", None, "finite"),
    "no bytes of a text": (b"\xff\xfe1", None, "expected a number"),
    "no names": (None, b"{}", "called reward, score or accuracy, got '{}'"),
    "counts": (None, b'{"passed": 28, "total": 28}', "called reward, score or accuracy, got .*passed.*total"),
    "counts beside an empty text": (b"", b'{"passed": 28}', "called reward, score or accuracy, got .*passed"),
    "a high reward": (None, b'{"reward": "high"}', "reward: expected a number, got 'high'"),
    "a reward that is a text, beside a number": (b"1", b'{"reward": "1"}', "reward: expected a number, got '1'"),
    "a score that is a text": (None, b'{"score": "28/28"}', "called reward, score or accuracy, got .*28/28"),
    "a list": (None, b"[1]", "expected a number"),
    "a text": (None, b'"1"', "expected a number"),
    "too large": (None, b"1e999", "finite"),
    "no number among parts": (b"1", b'{"reward": 1, "part": NaN}', "finite"),
    "a beginning": (b"1", b"{", "expected JSON"),
    "too deep": (None, b"[" * 60_000, "expected JSON"),
}
"""What is no reward, and what is said of it."""
REFUSED: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "another number": (b"0", b'{"reward": 1}', "says 0 and .* 1"),
    "another bare number": (b"1", b"0", "says 1 and .* 0"),
    "a text that is no number, beside a reward": (b"failed", b'{"reward": 1}', "expected a number, got 'failed'"),
    "too many digits": (None, b'{"reward": 1' + b"0" * 400 + b"}", "finite"),
}
"""What is no reward here, although Harbor may take one."""
WRITTEN = {**PAID, **ALSO_PAID}
JUDGE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from harbor.models.verifier.result import VerifierResult
from harbor.verifier.verifier import Verifier

def judged(folder):
    verifier = Verifier.__new__(Verifier)
    text, structure = folder / "reward.txt", folder / "reward.json"
    verifier.trial_paths = SimpleNamespace(reward_text_path=text, reward_json_path=structure)
    try:
        read = verifier._parse_reward_json() if structure.exists() else verifier._parse_reward_text()
        return VerifierResult(rewards=read).rewards.get("reward")
    except Exception:
        return None

print(json.dumps({name: judged(Path(name)) for name in sys.argv[1:]}))
"""


@pytest.mark.parametrize(("text", "structure", "reward"), WRITTEN.values(), ids=WRITTEN)
def test_a_reward_is_read(text: bytes | None, structure: bytes | None, reward: float) -> None:
    assert read_reward(text, structure).reward == reward


@pytest.mark.parametrize(("text", "structure", "said"), [*UNPAID.values(), *REFUSED.values()], ids=[*UNPAID, *REFUSED])
def test_what_is_no_reward_is_named(text: bytes | None, structure: bytes | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_reward(text, structure)


def test_named_numbers_are_kept_without_remarks() -> None:
    read = read_reward(b"1", b'{"passed": 3, "all": true, "status": "pass", "failed": null}')
    assert dict(read.parts) == {"passed": 3.0, "all": 1.0}


@pytest.mark.starts
@pytest.mark.skipif(HARBOR_PYTHON is None, reason="HARBOR_PYTHON names no Python 3.12 with harbor")
def test_harbor_itself_pays_what_is_paid_here_and_nothing_that_is_refused_here(tmp_path: Path) -> None:
    cases = {**PAID, **ALSO_PAID, **UNPAID}
    for number, (text, structure, _) in enumerate(cases.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, contents in (("reward.txt", text), ("reward.json", structure)):
            if contents is not None:
                (folder / name).write_bytes(contents)
    folders = [str(tmp_path / str(number)) for number in range(len(cases))]
    judged = json.loads(asked_of_harbor(JUDGE, *folders))
    found = {name: judged[folder] for name, folder in zip(cases, folders, strict=True)}
    assert {name: found[name] for name in PAID} == {name: reward for name, (_, _, reward) in PAID.items()}
    assert {name: found[name] for name in (*ALSO_PAID, *UNPAID) if found[name] is not None} == {}
