"""Agents that users write pass strict type checkers: the one of the README, and one that uses the rest of the client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS: list[str] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
TOKEN_LEVEL = """\
from agentrl import Client, MessageLike, RolloutWorkflow, StopReason, Task, Trajectory


class TokenLevel(RolloutWorkflow):
    async def rollout(self, task: Task, client: Client) -> Trajectory:
        generation = await client.generate(client.tokenizer.encode(task["question"]), max_tokens=8)
        client.reward_final(float("7" in client.tokenizer.decode(generation.output_ids)))
        return client.close(StopReason.COMPLETED)


class Rewarded(RolloutWorkflow):
    async def run(self, task: Task, client: Client) -> None:
        messages: list[MessageLike] = [{"role": "user", "content": task["question"]}]
        completion = await client.chat.completions.create(messages=messages)
        client.turns[-1].reward(0.5)
        client.record(length=len(completion.choices[0].message.content or ""))
        client.reward_final(1.0)


TokenLevel()
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    """A folder with one file for each agent."""
    (tmp_path / "readme_agent.py").write_text(SNIPPETS[0])
    (tmp_path / "token_level.py").write_text(TOKEN_LEVEL)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    return tmp_path


@pytest.mark.starts
@pytest.mark.long
@pytest.mark.parametrize(
    "checker",
    [
        ["pyright", "--pythonpath", sys.executable],
        ["mypy", "--strict", "--python-executable", sys.executable, "--cache-dir", ".mypy_cache"],
    ],
    ids=["pyright", "mypy"],
)
def test_an_agent_passes_a_strict_type_checker(agents: Path, checker: list[str]) -> None:
    command = [str(Path(sys.executable).with_name(checker[0])), *checker[1:], "readme_agent.py", "token_level.py"]
    result = subprocess.run(command, cwd=agents, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
