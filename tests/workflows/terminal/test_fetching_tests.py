"""Tests that need packages which their image lacks are a fault that names the command; others judge as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.containers import open_containers
from agentrl_workflows.terminal.fetching_tests import Fetch, fetches_of, missing_packages
from tests.support.terminal import play_script, write_naive_task

pytestmark = [pytest.mark.anyio]
PUBLISHED = """#!/bin/bash
# apt-get install nothing
apt-get update && apt-get install -y curl jq
curl -LsSf https://example.org/uv/install.sh | sh
source $HOME/.local/bin/env
uvx \\
  -p 3.13 -w pytest==8.4.1 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_commands_that_fetch_packages_are_found_with_their_lines() -> None:
    assert fetches_of(PUBLISHED) == [Fetch(3, "apt-get install", ("curl", "jq")), Fetch(6, "uvx", ())]
    script = "python3 -m pip install -q -r needs.txt 'pytest>=8' pytest-json-ctrf==0.3.5; uv run pytest\npython3 check.py"
    assert fetches_of(script) == [Fetch(1, "uv run", ()), Fetch(1, "pip install", ("pytest", "pytest-json-ctrf"))]
    assert fetches_of("pip --version; curl http://localhost:8000/; cat apt-get.txt; pip install -e .") == []


@pytest.mark.parametrize(
    ("script", "said", "lacks"),
    [
        ("uvx pytest", "/tests/test.sh: line 1: uvx: command not found", "uvx: command not found"),
        ("uvx pytest", "error: Failed to fetch: `https://example.org/simple/pytest/`", "Failed to fetch"),
        ("pip install pytest\npytest", "test.sh: 2: pytest: not found", "pytest: not found"),
        ("pip install pytest-asyncio", "ModuleNotFoundError: No module named 'pytest_asyncio'", "No module named"),
        (
            "apt-get install jq\njq . x",
            "Temporary failure resolving\nline 2: jq: command not found",
            "jq: command not found",
        ),
        ("apt-get install jq\njq . x", "Temporary failure resolving\n1 failed, 3 passed", ""),
        ("pip install pytest\npytest", "No matching distribution found for pytest==8.4.1\n1 failed in 0.1 s", ""),
        ("pip install pytest\npytest", "No module named 'stats'", ""),
        ("uvx pytest", "1 failed in 0.1 s", ""),
        ("apt-get install jq\nuvx pytest", "W: Failed to fetch http://deb.debian.org/debian/\n1 failed in 0.1 s", ""),
    ],
)
def test_tests_that_lack_a_package_are_told_by_their_words(script: str, said: str, lacks: str) -> None:
    missing = missing_packages(fetches_of(script), said)
    assert (lacks in missing) if lacks else missing == ""


@pytest.mark.starts
async def test_tests_whose_packages_the_image_lacks_are_a_fault_and_say_how_to_mend_it(tmp_path: Path) -> None:
    folder = write_naive_task(tmp_path / "published")
    (folder / "tests" / "test.sh").write_text(PUBLISHED)
    async with open_containers(images={"debian:12": None}) as containers:
        with pytest.raises(EnvironmentFault, match=r"test\.sh: line 6: uvx needs a network.*put what the tests need into"):
            await play_script(containers, folder, "echo 42 > answer.txt")


@pytest.mark.starts
async def test_tests_that_find_their_packages_judge_although_they_try_to_fetch_them(tmp_path: Path) -> None:
    folder = write_naive_task(tmp_path / "prepared")
    judge = "grep -qx 42 answer.txt; echo $((1 - $?)) > /logs/verifier/reward.txt"
    (folder / "tests" / "test.sh").write_text(f"pip install no-such-package==1.0\n{judge}\n")
    async with open_containers(images={"debian:12": None}) as containers:
        assert (await play_script(containers, folder, "echo 42 > answer.txt")).reward == 1.0
        assert (await play_script(containers, folder, "echo 'uvx: command not found'; echo 41 > answer.txt")).reward == 0.0
