"""Online runs that end and continue: no accepted feedback is lost, and no conversation is trained twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.parts import BEGUN_RUN, RunState
from agentrl.observe.runs.reading import read_trained_lines
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl_doors.online.conversation_files import ConversationFiles
from tests.engine.harness import lines
from tests.online.clients import asked, posted
from tests.online.harness import KEYS, online_run
from tests.support.cli import END_S
from tests.support.doors import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Doors and their clients need asyncio."""
    return "asyncio"


def trained_ids(run_dir: Path) -> list[str]:
    """Return the conversations of all steps, by the records of the run."""
    steps = sorted(int(file.name[8:14]) for file in (run_dir / "episodes").glob("trained-*"))
    return [json.loads(line)["episode_id"].partition(".")[2] for step in steps for line in read_trained_lines(run_dir, step)]


async def test_a_run_that_ends_before_its_first_step_continues_with_its_feedback(tmp_path: Path, renderer: Renderer) -> None:
    run_dir = tmp_path / "run"
    async with online_run(run_dir, renderer) as run:
        _, ended = await run.chat("Hello.")
        assert (await run.feedback(1.0, conversation_id=ended))[0] == 200
        first, waiting = await run.chat("Hi.")
        second, _ = await run.chat("Hi.", "good", "And?")
        assert (await run.feedback(0.25, response_id=first["id"]))[0] == 200
    assert run.trainer.batches == []
    async with online_run(run_dir, renderer, resume=BEGUN_RUN) as run:
        assert run.trainer.batches == [], "the second conversation may still get feedback"
        _, other = await run.chat("Hi.", "good", "And?", "good", "More?")
        assert other != waiting, "a conversation takes no requests after a restart"
        status, body = await run.feedback(1.0, response_id=first["id"])
        assert (status, "has the reward 0.25 already" in body["error"]["message"]) == (409, True)
        assert (await run.feedback(-1.0, response_id=second["id"], final=True))[0] == 200
        await until(lambda: run.trainer.batches)
    assert sorted(trained_ids(run_dir)) == sorted([ended, waiting])
    [batch] = run.trainer.batches
    assert {int(version) for each in batch.samples for version in each.sample.token_versions[each.sample.loss_mask]} == {1}


async def test_a_resumed_run_trains_again_what_no_checkpoint_holds_and_nothing_else(
    tmp_path: Path, renderer: Renderer
) -> None:
    run_dir, trainer = tmp_path / "run", ScriptedTrainer()
    saving: dict[str, Any] = {"engine": {"checkpoint_every": 2}, "algorithm": {"max_staleness": 8}}
    names: list[str] = []
    async with online_run(run_dir, renderer, trainer=trainer, steps=5, **saving) as run:
        for step in range(1, 4):
            for reward in (0.0, 1.0):
                _, name = await run.chat("Hello.")
                names.append(name)
                assert (await run.feedback(reward, conversation_id=name))[0] == 200
            await until(lambda: len(lines(run_dir / "metrics.jsonl", "step")) == step)  # noqa: B023 - called in this pass
        _, name = await run.chat("Hello.")
        names.append(name)
        assert (await run.feedback(1.0, conversation_id=name))[0] == 200
    state = RunState.from_note(trainer.notes[0], where="here")
    assert state.step == 2
    async with online_run(run_dir, renderer, resume=state, steps=4, **saving) as run:
        await until(lambda: run.trainer.batches)
        _, name = await run.chat("Hello.")
        names.append(name)
        assert (await run.feedback(0.0, conversation_id=name))[0] == 200
        await until(lambda: len(run.trainer.batches) == 2)
    assert trained_ids(run_dir) == names, "in the order of their feedback, once each"


async def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path, renderer: Renderer) -> None:
    async with online_run(tmp_path, renderer) as run:
        answer, name = await run.chat("Hello.")
        assert (await run.feedback(1.0, response_id=answer["id"]))[0] == 200
    file = tmp_path / "online" / f"{name}.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])
    (tmp_path / "online" / "empty.jsonl").touch()
    [stored] = ConversationFiles(tmp_path).take_up(0)
    assert (stored.opened.name, len(stored.answers), len(stored.feedback)) == (name, 1, 1)
    assert file.read_bytes() == whole


@pytest.mark.starts
def test_feedback_that_was_confirmed_survives_a_kill(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with serving_process(run_dir) as (url, process):
        _, name = asked(url, KEYS["web"])
        assert posted(f"{url}/feedback", KEYS["web"], {"reward": 1.0, "conversation_id": name})["accepted"] is True
        process.send_signal(signal.SIGKILL)
        process.wait(END_S)
    with serving_process(run_dir, "resume") as (url, process):
        _, other = asked(url, KEYS["web"])
        posted(f"{url}/feedback", KEYS["web"], {"reward": 0.0, "conversation_id": other})
        assert process.wait(END_S) == 0, "the run ends after its one step"
    assert trained_ids(run_dir) == [name, other]


@contextmanager
def serving_process(run_dir: Path, *arguments: str) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """Start a run of one step in a process of its own, and yield its address."""
    command = [sys.executable, "-m", "tests.online.scripted_run", str(run_dir), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()
