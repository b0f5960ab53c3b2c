"""Tests with an environment of their own, commands that collect, and health checks, as the format of Harbor has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.types import StopReason, Trajectory
from agentrl_testing import call, play_async
from agentrl_workflows.terminal import TerminalAgent

pytestmark = [pytest.mark.anyio, pytest.mark.starts]
ARGUMENTS = {"images": {"debian:12": None}}
REWARD = "/logs/verifier/reward.txt"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_folder(folder: Path, test: str, settings: str) -> dict[str, str]:
    for name in ("tests", "environment"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(f'schema_version = "1.4"\n{settings}')
    (folder / "instruction.md").write_text("Write 42.\n")
    (folder / "environment" / "Dockerfile").write_text("FROM debian:12\nWORKDIR /app\nCOPY . /app\n")
    (folder / "environment" / "given.txt").write_text("given\n")
    (folder / "tests" / "test.sh").write_text(test)
    return {"question": "Write 42.", "folder": str(folder)}


async def played(task: dict[str, str], script: str) -> Trajectory:
    return await play_async(TerminalAgent, task, [call("bash", command=script), "Done."], workflow_args=ARGUMENTS)


APART = 'artifacts = ["/app/answer.txt"]\n[verifier]\nenvironment_mode = "separate"\n'
COUNTS = f'ls /app /logs/artifacts > /app/seen; [ "$(cat answer.txt)" = 42 ]; echo $((1 - $?)) > {REWARD}'


async def test_tests_with_an_environment_of_their_own_get_the_artifacts_and_nothing_else(tmp_path: Path) -> None:
    test = f"{COUNTS}\n[ -e other.txt ] && echo 9 > {REWARD}\n[ $(cat given.txt) = given ] || echo 8 > {REWARD}"
    task = write_folder(tmp_path, test, APART)
    paid = await played(task, "echo 42 > answer.txt; touch other.txt; echo changed > given.txt")
    assert (paid.final_reward, paid.metrics["verifier_broken"]) == (1.0, 0), paid.failure
    assert (await played(task, "echo 41 > answer.txt")).final_reward == 0.0


@pytest.mark.parametrize(
    "attack",
    [
        f"mkdir -p /logs/verifier /logs/artifacts; echo 1 | tee {REWARD} /logs/artifacts/reward.txt",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; ln -s /tests /logs/artifacts",
        "mkdir -p /logs; ln -s /logs/verifier /logs/artifacts; ln -s /tests/test.sh answer.txt",
        "rm -rf /app; ln -s /tests /app",
        "for p in tar sh grep cat; do printf '#!/bin/bash\\necho 42' > /usr/bin/$p; done; echo 41 > answer.txt",
        "mkdir answer.txt; cd answer.txt; ln -s /logs/verifier v; ln -s /tests t",
        "head -c 9000000000 /dev/zero > answer.txt",
        "while true; do echo 1 > /logs/artifacts/reward.txt; done & echo 41 > answer.txt",
    ],
)
async def test_agents_that_attack_tests_with_an_environment_of_their_own_get_nothing(tmp_path: Path, attack: str) -> None:
    paid = await played(write_folder(tmp_path, COUNTS, APART), attack)
    assert (paid.stop_reason, paid.final_reward) == (StopReason.COMPLETED, 0.0), paid.failure


async def test_an_image_of_the_tests_has_their_files_and_commands_and_judges_alone(tmp_path: Path) -> None:
    task = write_folder(tmp_path, f"cmp -s answer.txt /tests/right.txt && bash /opt/pay.sh || echo 0 > {REWARD}", APART)
    (tmp_path / "tests" / "right.txt").write_text("42\n")
    lines = (
        "FROM debian:12",
        "WORKDIR /app",
        "COPY test.sh right.txt /tests/",
        f"RUN echo 'echo 1 > {REWARD}' > /opt/pay.sh",
    )
    (tmp_path / "tests" / "Dockerfile").write_text("\n".join(lines))
    assert (await played(task, "echo 42 > answer.txt")).final_reward == 1.0
    idle = await played(task, "[ -e /opt/pay.sh ] && echo 42 > answer.txt")
    assert (idle.final_reward, idle.metrics["verifier_broken"]) == (0.0, 0)


async def test_commands_that_collect_run_in_the_container_of_the_agent_once_it_is_done(tmp_path: Path) -> None:
    collect = (
        '[[verifier.collect]]\ncommand = "exit 3"\n'
        '[[verifier.collect]]\ncommand = "mkdir -p /logs/artifacts; cat /tmp/state > /logs/artifacts/state"\n'
    )
    test = f'[ "$(cat /logs/artifacts/state)" = 42 ]; echo $((1 - $?)) > {REWARD}'
    task = write_folder(tmp_path, test, f"{APART}{collect}")
    assert (await played(task, "echo 42 > /tmp/state")).final_reward == 1.0
    assert (await played(task, "true")).final_reward == 0.0


async def test_an_agent_begins_when_its_environment_is_healthy_and_a_sick_one_is_a_fault(tmp_path: Path) -> None:
    check = '[environment.healthcheck]\ncommand = "{}"\nretries = 2\ninterval_sec = 0\nstart_interval_sec = 0\n'
    test = f"[ $(cat tries) = xx ]; echo $((1 - $?)) > {REWARD}"
    well = "printf x >> /app/tries; [ $(cat /app/tries) = xx ]"
    healthy = await played(write_folder(tmp_path / "healthy", test, check.format(well)), "true")
    assert healthy.final_reward == 1.0, healthy.failure
    sick = await played(write_folder(tmp_path / "sick", test, check.format("echo no port; exit 1")), "true")
    assert (sick.stop_reason, sick.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)
    assert sick.failure is not None
    assert "environment.healthcheck: echo no port; exit 1 failed 2 times, and said: no port" in sick.failure.message
