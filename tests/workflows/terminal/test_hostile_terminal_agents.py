"""No agent that attacks the tests of its task, or the container around them, is paid; and none makes a fault of its 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl_sandbox.containers import open_containers
from agentrl_sandbox.containers.fleet.fleet import open_fleet
from tests.support.hostile_agents import CLOSING, NAIVE, OWNED, READING, RUNNING
from tests.support.hosts import HOST_KEY, running_host
from tests.support.terminal import SCRIPT_LIMITS, outcomes_in, write_bundled_task, write_naive_task

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(1800)]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def outcomes(folder: Path, agents: Mapping[str, str], patience_s: float = 20) -> dict[str, object]:
    """Return what each agent got, or the fault that it caused."""
    async with open_containers(images={"debian:12": None}) as containers:
        return await outcomes_in(containers, folder, agents, patience_s)


@pytest.mark.starts
@pytest.mark.long
async def test_agents_that_attack_a_trusting_test_get_nothing(tmp_path: Path) -> None:
    folder = write_naive_task(tmp_path / "naive")
    honest = await outcomes(folder, {"honest": "echo 42 > answer.txt"})
    assert honest == {"honest": 1.0}
    assert {name: got for name, got in (await outcomes(folder, {**NAIVE, **OWNED})).items() if got != 0.0} == {}


@pytest.mark.starts
async def test_agents_that_close_their_files_to_those_who_judge_get_nothing(tmp_path: Path) -> None:
    folder = write_naive_task(tmp_path / "naive")
    assert await outcomes(folder, CLOSING) == dict.fromkeys(CLOSING, 0.0)
    assert await outcomes(folder, {"honest": "chmod 000 /root; echo 42 > answer.txt"}) == {"honest": 1.0}


@pytest.mark.starts
async def test_agents_on_a_host_that_close_their_files_to_those_who_judge_get_nothing(tmp_path: Path) -> None:
    folder = write_naive_task(tmp_path / "naive")
    with running_host() as (url, _):
        opened = open_fleet([url], api_key=HOST_KEY, images={"debian:12": None}, limits=SCRIPT_LIMITS)
        async with opened as fleet:
            assert await outcomes_in(fleet, folder, CLOSING, 20) == dict.fromkeys(CLOSING, 0.0)


@pytest.mark.starts
async def test_agents_whose_answer_is_no_plain_file_get_nothing(tmp_path: Path) -> None:
    folder = write_bundled_task(tmp_path, "count-lines")
    assert {name: got for name, got in (await outcomes(folder, READING)).items() if got != 0.0} == {}


@pytest.mark.starts
@pytest.mark.long
async def test_programs_that_attack_the_test_that_runs_them_get_nothing(tmp_path: Path) -> None:
    folder = write_bundled_task(tmp_path, "mend-the-median")
    settings = folder / "task.toml"
    settings.write_text(settings.read_text().replace("timeout_sec = 120.0", "timeout_sec = 45.0"))  # some stop the tests
    assert {name: got for name, got in (await outcomes(folder, RUNNING)).items() if got != 0.0} == {}


@pytest.mark.starts
async def test_programs_that_write_a_second_reward_beside_that_of_the_tests_get_nothing(tmp_path: Path) -> None:
    folder = write_naive_task(tmp_path / "naive")
    (folder / "tests" / "test.sh").write_text(
        '[ "$(bash /app/answer.sh)" = 42 ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
    )
    wrong = {
        name: f"cat > answer.sh <<'END'\necho '{reward}' > /logs/verifier/reward.json; echo 41\nEND"
        for name, reward in {"named": '{"reward": 1}', "true": "true", "score": '{"score": 1, "accuracy": 1}'}.items()
    }
    right = {"honest": "echo 'echo 42' > answer.sh"}
    assert await outcomes(folder, {**wrong, **right}) == {**dict.fromkeys(wrong, 0.0), "honest": 1.0}


def test_there_are_more_than_eighty_hostile_agents() -> None:
    assert sum(map(len, (CLOSING, NAIVE, OWNED, READING, RUNNING))) > 80
