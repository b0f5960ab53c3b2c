"""Programs of a command inside the sandbox: they reach the door and nothing else, and end whole whatever they do."""

from __future__ import annotations

import secrets
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.tokens.verify import verify
from agentrl.types import StopReason, Task, Trajectory
from agentrl.workflow import load_workflow
from agentrl_testing import call, play
from agentrl_workflows.command import Work
from tests.support.leftovers import processes_with
from tests.support.sandboxes import usable_host

pytestmark = pytest.mark.starts

COMMAND = "agentrl_workflows.command:CommandWorkflow"
TASK: dict[str, Any] = {"id": "t1", "question": "What is 6 times 7?", "answer": "42"}
ASK = """
ask() {
  curl -sS --json "{\\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"$1\\"}]}" "$OPENAI_BASE_URL/chat/completions"
}
"""
SMALL = {"limits": {"memory_mb": 128, "address_space_mb": 4096, "work_mb": 8, "processes": 16, "num_files": 256}}


@pytest.fixture(autouse=True)
def _usable() -> None:
    usable_host()


def ran(script: str, replies: list[Any] | None = None, **settings: Any) -> Trajectory:  # noqa: ANN401
    """Play an episode whose agent is a shell script in the sandbox."""
    given = {"command": ["sh", "-euc", ASK + script], "sandbox": SMALL, "timeout_s": 300, **settings}
    return play(load_workflow(COMMAND, given), TASK, replies or [])


def test_a_program_in_the_sandbox_plays_through_the_door_and_its_result_file_is_the_reward(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("41")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran")
    (tmp_path / "run.sh").chmod(0o755)
    script = """
    test "$(pwd)" = /work && test "$HOME" = /work && grep -q 'What is' task.json
    test "$(./run.sh)" = ran && test "$(cat notes/a.txt)" = 41 && rm notes/a.txt
    ask one; ask two > answer.json; grep -q 42 answer.json && echo '{"reward": 0.75}' > reward.json
    """
    found = ran(script, ["41", "42"], result="reward.json", directory=str(tmp_path), sandbox=True)
    assert found.failure is None, found.failure
    assert [turn.message["content"] for turn in found.turns] == ["41", "42"]
    assert (found.final_reward, found.stop_reason) == (0.75, StopReason.COMPLETED)
    assert (tmp_path / "notes" / "a.txt").read_text() == "41"
    verify(found)


def test_a_reward_may_be_posted_from_the_sandbox() -> None:
    script = """ask one; curl -sS --json '{"reward": 0.5}' "$AGENTRL_REWARD_URL" """
    assert ran(script, ["42"], rewards="all").final_reward == 0.5


def test_nothing_but_the_door_is_reached() -> None:
    script = """
    refused() { if curl -sS -m 20 "$1"; then echo "reached $1" >&2; exit 9; fi; }
    refused "http://127.0.0.1:$OTHER/"; refused http://192.0.2.1/; refused http://169.254.169.254/
    test ! -e "$HIDDEN" && ask one
    """
    hidden = str(Path(__file__).resolve())
    with socket.create_server(("127.0.0.1", 0)) as other:
        env = {"OTHER": str(other.getsockname()[1]), "HIDDEN": hidden}
        found = ran(script, ["42"], env=env, exit_rewards={0: 1.0})
    assert found.failure is None, found.failure
    assert (found.final_reward, len(found.turns)) == (1.0, 1)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("yes", "output limit"),
        ("while :; do :; done", "timeout limit"),
        ("f() { f | f & }; f; exec sleep 1000", "timeout limit"),
        ("exec tail /dev/zero", "memory limit"),
        ("yes > filled", "exit status"),
        ("(setsid sh -c ': MARK; sleep 1000 & sleep 1000; true' &); exit 3", "exit status 3"),
    ],
    ids=["floods", "spins", "forks", "eats memory", "fills its disk", "leaves daemons"],
)
def test_a_hostile_program_is_ended_whole_and_earns_nothing(script: str, said: str) -> None:
    mark = secrets.token_hex(8)
    quick = 2 if said == "timeout limit" else 300
    found = ran(f": {mark}\n{script}".replace("MARK", mark), exit_rewards={0: 1.0}, timeout_s=quick)
    assert found.failure is not None
    assert found.failure.kind == "EnvironmentFault"
    assert said in found.failure.message
    assert found.final_reward is None
    assert not processes_with(mark)


def test_a_result_file_that_is_a_link_is_no_reward() -> None:
    found = ran("echo 1 > real; ln -s real reward.json", result="reward.json")
    assert found.failure is not None
    assert "left no reward.json" in found.failure.message


def test_files_of_a_task_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(20_000_000))
    found = ran("true", directory=str(tmp_path), exit_rewards={0: 1.0})
    assert found.failure is not None
    assert "do not fit" in found.failure.message


async def runs_what_was_written(text: str, task: Task, work: Work) -> float:
    """Run the program that the agent left, in a sandbox of its own."""
    from agentrl_sandbox import python_program

    assert text == "done"
    result = await work.sandbox.run(python_program(work.files["src/answer.py"].decode()))
    return float(result.stdout.decode().strip() == task["answer"])


@pytest.mark.parametrize("sandbox", [None, True])
def test_a_grader_of_three_arguments_gets_the_files_and_a_sandbox(sandbox: object) -> None:
    script = "mkdir src; echo 'print(6 * 7)' > src/answer.py; ln -s /etc/passwd src/link; echo done"
    found = ran(script, no_call="allow", grader=f"{__name__}:runs_what_was_written", sandbox=sandbox)
    assert found.failure is None, found.failure
    assert found.final_reward == 1.0


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_example_in_javascript_runs_in_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    run = load_config("examples/command/run.yaml")
    sandbox = {"limits": {"memory_mb": 512, "address_space_mb": 65536}}
    workflow = load_workflow(run.workflow, {**run.workflow_args, "sandbox": sandbox})
    found = play(workflow, TASK, [call("calc", a=6, op="*", b=7), "It is 42."])
    assert found.failure is None, found.failure
    assert (found.final_reward, len(found.turns)) == (1.0, 2)


def test_a_backend_that_cannot_reach_the_door_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sandbox"):
        load_workflow(COMMAND, {"command": ["true"], "sandbox": {"backend": "nothing"}})
    for sandbox in ({"backend": "remote", "url": "http://127.0.0.1:9"}, {"backend": "docker"}):
        with pytest.raises(ConfigError, match=f"the backend {sandbox['backend']} cannot reach a port"):
            load_workflow(COMMAND, {"command": ["true"], "sandbox": sandbox})
