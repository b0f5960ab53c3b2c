"""The terminal agent shows the model what its shell does, and pays what the tests of the task say."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import RunStopped
from agentrl.types import StopReason, Trajectory
from agentrl_sandbox.containers import open_containers
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_testing import call, play_async
from agentrl_workflows.terminal import Screen, TerminalAgent
from agentrl_workflows.terminal.verifier import kept_paths
from tests.support.terminal import write_problem

pytestmark = [pytest.mark.anyio]
ARGUMENTS = {"images": {"debian:12": None}}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def write_folder(folder: Path, test: str) -> dict[str, str]:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text('schema_version = "1.4"\n[verifier]\ntimeout_sec = 5\n[agent]\ntimeout_sec = 60\n')
    (folder / "instruction.md").write_text("Write 1.\n")
    (folder / "tests" / "test.sh").write_text(test)
    return {"question": "Write 1.", "folder": str(folder)}


def replies_of(trajectory: Trajectory) -> str:
    return "\n".join(str(turn.message.get("content")) for turn in trajectory.turns)


@pytest.mark.starts
async def test_the_model_works_in_a_shell_and_is_paid_by_the_tests(tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    replies = [
        call("bash", command="cd /tmp; X=data.txt"),
        call("bash", command="wc -l < /app/$X > /app/count.txt"),
        "Done.",
    ]
    paid = await play_async(TerminalAgent, task, replies, workflow_args=ARGUMENTS)
    assert (paid.final_reward, paid.stop_reason) == (1.0, StopReason.COMPLETED)
    assert (paid.metrics["commands"], paid.metrics["finished"], paid.metrics["verifier_broken"]) == (2, 1, 0)
    lazy = await play_async(TerminalAgent, task, ["Done."], workflow_args=ARGUMENTS)
    assert lazy.final_reward == 0.0


@pytest.mark.starts
async def test_the_last_turn_that_is_allowed_counts(tmp_path: Path) -> None:
    task = write_problem(tmp_path, "count-lines")
    replies = [call("bash", command="wc -l < data.txt > count.txt")]
    paid = await play_async(TerminalAgent, task, replies, workflow_args={**ARGUMENTS, "max_turns": 1})
    assert (paid.final_reward, paid.metrics["finished"]) == (1.0, 0)


@pytest.mark.starts
async def test_tests_that_name_no_reward_whatever_the_agent_does_are_a_fault(tmp_path: Path) -> None:
    for number, test in enumerate(("true", "echo nan > /logs/verifier/reward.txt", "sleep 1000", "exit 1")):
        task = write_folder(tmp_path / str(number), test)
        played = await play_async(TerminalAgent, task, ["Done."], workflow_args=ARGUMENTS)
        assert played.stop_reason is StopReason.ENVIRONMENT_FAULT, test
        assert played.failure is not None
        assert "names no reward" in played.failure.message


@pytest.mark.starts
async def test_an_image_that_is_not_there_is_named_once_a_task_needs_it(tmp_path: Path) -> None:
    task = write_folder(tmp_path, "echo 1 > /logs/verifier/reward.txt")
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "Dockerfile").write_text("FROM node:22\nWORKDIR /app\n")
    played = await play_async(TerminalAgent, task, ["Done."], workflow_args=ARGUMENTS)
    assert (played.stop_reason, played.final_reward) == (StopReason.ENVIRONMENT_FAULT, None)
    assert played.failure is not None
    assert "there is no image 'node:22'" in played.failure.message
    arguments = {"images": {**ARGUMENTS["images"], "node:22": str(tmp_path / "nothing")}}
    with pytest.raises(RunStopped, match=r"images: node:22: .*expected an unpacked image.*; correct its entry in `images`"):
        await play_async(TerminalAgent, task, ["Done."], workflow_args=arguments)
    (tmp_path / "environment" / "Dockerfile").unlink()
    assert (await play_async(TerminalAgent, task, ["Done."], workflow_args=arguments)).final_reward == 1.0


@pytest.mark.starts
async def test_tests_that_the_agent_broke_pay_nothing(tmp_path: Path) -> None:
    task = write_folder(tmp_path / "one", "[ -e /app/x ] && exit 3\necho 0.5 > /logs/verifier/reward.txt")
    broken = await play_async(TerminalAgent, task, [call("bash", command="touch x"), "Done."], workflow_args=ARGUMENTS)
    assert (broken.final_reward, broken.metrics["verifier_broken"]) == (0.0, 1)
    kept = await play_async(TerminalAgent, task, ["Done."], workflow_args=ARGUMENTS)
    assert (kept.final_reward, kept.metrics["verifier_broken"]) == (0.5, 0)


@pytest.mark.starts
async def test_named_parts_are_recorded(tmp_path: Path) -> None:
    task = write_folder(tmp_path / "one", 'echo \'{"reward": 0.75, "style": 0.5}\' > /logs/verifier/reward.json')
    played = await play_async(TerminalAgent, task, ["Done."], workflow_args=ARGUMENTS)
    assert (played.final_reward, played.metrics["reward.style"]) == (0.75, 0.5)


@pytest.mark.starts
async def test_a_screen_tells_of_cuts_interrupts_and_lost_shells() -> None:
    async with open_containers() as containers, containers.workbench() as bench, bench.run(directory="/app") as container:
        screen = Screen(container, max_chars=40, command_s=30)
        assert await screen.bash("true") == "(no output)"
        assert await screen.bash("echo to the screen >&2; false") == "to the screen\n[exit status 1]"
        screen.begin_turn()
        assert "[1492 characters left out; read less at a time]" in await screen.bash("head -c 1532 /dev/zero | tr '\\0' x")
        assert await screen.bash("exit 3") == "[exit status 3]\n[a new shell starts in the first directory]"
        hasty = Screen(container, max_chars=40, command_s=0.3)
        assert await hasty.bash("sleep 100") == "[interrupted after 0.3 s]"
        assert (screen.counts["cut"], hasty.counts["timeouts"]) == (1, 1)


@pytest.mark.starts
async def test_the_commands_of_one_turn_share_its_budget_and_the_next_turn_has_a_whole_one() -> None:
    async with open_containers() as containers, containers.workbench() as bench, bench.run(directory="/app") as container:
        screen = Screen(container, max_chars=40)
        for _ in range(2):
            screen.begin_turn()
            said = [await screen.bash(f"printf {letter * 30}") for letter in "abc"]
            cut = "[20 characters left out; read less at a time]"
            assert said == ["a" * 30, f"bbbbb\n{cut}\nbbbbb", "[30 characters left out; read less at a time]"]
        assert screen.counts == {"commands": 6, "timeouts": 0, "cut": 4}


FEEDBACK = "cd /app && ls *.txt 2>/dev/null | wc -l > /logs/verifier/reward.txt"


@pytest.mark.starts
async def test_feedback_of_a_task_rewards_each_turn_with_what_it_gained(tmp_path: Path) -> None:
    task = write_folder(tmp_path / "one", "echo 1 > /logs/verifier/reward.txt")
    (tmp_path / "one" / "tests" / "feedback.sh").write_text(FEEDBACK)
    replies = [
        call("bash", command="touch a.txt b.txt; cd /tmp; X=kept; mkdir -p /tests; echo 'exit 1' > /tests/feedback.sh"),
        call("bash", command="ls /app | wc -l; rm /app/a.txt; mkdir -p /logs/verifier; echo 9 > /logs/verifier/reward.txt"),
        call("bash", command="echo $X $PWD; ls /app; ls /tmp"),
        "Done.",
    ]
    played = await play_async(TerminalAgent, task, replies, workflow_args=ARGUMENTS)
    assert [turn.reward for turn in played.turns] == [1.0, -0.5, 0.0, None]
    assert (played.final_reward, played.episode_return) == (1.0, 1.5)
    assert (played.metrics["feedback"], played.metrics["feedback_missed"]) == (1, 0)
    off = await play_async(TerminalAgent, task, replies, workflow_args={**ARGUMENTS, "feedback_weight": 0})
    assert [turn.reward for turn in off.turns] == [None] * 4


@pytest.mark.starts
async def test_episodes_whose_containers_are_all_taken_still_get_feedback(tmp_path: Path) -> None:
    task = write_folder(tmp_path / "one", "echo 1 > /logs/verifier/reward.txt")
    (tmp_path / "one" / "tests" / "feedback.sh").write_text(FEEDBACK)
    arguments = {**ARGUMENTS, "max_open": 1}
    played = await play_async(TerminalAgent, task, [call("bash", command="touch a.txt"), "Done."], workflow_args=arguments)
    assert [turn.reward for turn in played.turns] == [0.5, None]


@pytest.mark.starts
async def test_commands_of_an_image_run_once_for_its_episodes_their_feedback_and_their_tests(tmp_path: Path) -> None:
    same = "cmp -s /opt/id /app/id && reward=1 || reward=0; echo $reward > /logs/verifier/reward.txt"
    task = write_folder(tmp_path / "one", f"[ -e /app/broken ] && exit 1\n{same}")
    (tmp_path / "one" / "tests" / "feedback.sh").write_text(same)
    (tmp_path / "one" / "environment").mkdir()
    dockerfile = "FROM debian:12\nWORKDIR /app\nRUN head -c 16 /dev/urandom > /opt/id\n"
    (tmp_path / "one" / "environment" / "Dockerfile").write_text(dockerfile)
    replies = [call("bash", command="cp /opt/id ."), "Done."]
    agent = TerminalAgent(images=ARGUMENTS["images"])
    async with agent.opened():
        for _ in range(2):
            played = await play_async(agent, task, replies)
            assert (played.turns[0].reward, played.final_reward) == (0.5, 1.0)
        broken = await play_async(agent, task, [call("bash", command="touch broken"), "Done."])
        assert (broken.final_reward, broken.metrics["verifier_broken"]) == (0.0, 1), broken.failure


@pytest.mark.starts
async def test_feedback_that_says_nothing_is_counted_and_changes_no_reward(tmp_path: Path) -> None:
    task = write_folder(tmp_path / "one", "echo 1 > /logs/verifier/reward.txt")
    (tmp_path / "one" / "tests" / "feedback.sh").write_text(f"[ -e /app/bad.txt ] && exit 1\n{FEEDBACK}")
    scripts = (
        "touch a.txt",
        "touch bad.txt",
        "rm bad.txt; ln -s /etc/passwd c.txt; touch 'x y.txt'",
        "rm -r /app",
        "ls /app",
    )
    replies = [*(call("bash", command=script) for script in scripts), "Done."]
    played = await play_async(TerminalAgent, task, replies, workflow_args={**ARGUMENTS, "feedback_weight": 1})
    assert [turn.reward for turn in played.turns] == [1.0, 0.0, 2.0, 0.0, 0.0, None]
    assert (played.metrics["feedback_missed"], played.final_reward) == (3, 0.0)  # the directory is gone


DYING = {
    "while it is copied": """
cat > /tmp/bomb.py <<'END'
import os
while not any(name.isdigit() and open(f"/proc/{name}/comm").read().strip() == "tar" for name in os.listdir("/proc")):
    pass
eaten = [bytearray(b"a") * (100 * 10**6) for _ in range(100)]
END
head -c 30000000 /dev/urandom > /app/big
setsid sh -c 'until python3 /tmp/bomb.py; do :; done' >/dev/null 2>&1 &""",
    "while its copy is read": "head -c 45000000 /dev/urandom > /app/big",
}


@pytest.mark.starts
@pytest.mark.parametrize("script", DYING.values(), ids=DYING)
async def test_an_agent_whose_container_dies_during_feedback_is_judged_all_the_same(tmp_path: Path, script: str) -> None:
    task = write_folder(tmp_path / "one", "[ -e /app/x ]; echo $((1 - $?)) > /logs/verifier/reward.txt")
    (tmp_path / "one" / "tests" / "feedback.sh").write_text(FEEDBACK)
    limits = {"memory_mb": 160, "work_mb": 120}
    replies = [call("bash", command=script), "Done."]
    played = await play_async(TerminalAgent, task, replies, workflow_args={**ARGUMENTS, "limits": limits})
    assert (played.stop_reason, played.final_reward) == (StopReason.COMPLETED, 0.0), played.failure
    assert played.metrics["feedback_missed"] == 1


def test_the_tests_see_own_directories_and_what_the_task_names(tmp_path: Path) -> None:
    write_folder(tmp_path / "one", "true")
    file = tmp_path / "one" / "task.toml"
    file.write_text(
        file.read_text() + '[metadata.agentrl]\nkeep = ["/etc/nginx"]\n[environment]\nworkdir = "/usr/src/job"\n'
    )
    harbor = read_harbor_folder(tmp_path / "one")
    changed = ["/app", "/etc", "/logs", "/root", "/srv", "/tests", "/tmp", "/usr"]
    assert kept_paths(changed, harbor) == ["/app", "/srv", "/usr/src/job", "/etc/nginx"]


@pytest.mark.starts
async def test_programs_of_the_agent_in_a_directory_of_the_path_do_not_reach_the_tests(tmp_path: Path) -> None:
    test = "python3 -c 'raise SystemExit(1)' && reward=1 || reward=0; echo $reward > /logs/verifier/reward.txt"
    task = write_folder(tmp_path, test)
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / "Dockerfile").write_text(
        "FROM debian:12\nENV PATH=/opt/venv/bin:/usr/bin:/bin\nWORKDIR /app\n"
    )
    plant = "mkdir -p /opt/venv/bin; printf '#!/bin/sh\\nexit 0\\n' > /opt/venv/bin/python3; chmod +x /opt/venv/bin/python3"
    played = await play_async(TerminalAgent, task, [call("bash", command=plant), "Done."], workflow_args=ARGUMENTS)
    assert (played.final_reward, played.failure) == (0.0, None)
