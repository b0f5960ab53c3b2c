"""The terminal demo's notes, demonstrations and tokenizer fit the containers and each other."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentrl_sandbox.containers import open_containers
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_workflows.terminal.bash_agent import Screen
from agentrl_workflows.terminal.benches import TaskBenches
from agentrl_workflows.terminal_demo.expert import NoteReader, demonstrate_note, note_demonstrations
from agentrl_workflows.terminal_demo.tasks import NoteTask, note_tasks, random_note
from agentrl_workflows.terminal_demo.tokenizer import write_terminal_tokenizer
from tests.support.terminal import SCRIPT_LIMITS, play_script


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def note_of(data: dict[str, object]) -> NoteTask:
    return NoteTask(verb=data["verb"], source=str(data["source"]), target=str(data["target"]))  # type: ignore[arg-type]


def test_training_and_held_out_tasks_share_no_note() -> None:
    train, held_out = (
        {note_of(dict(task.data)).text for task in note_tasks(count=80, seed=0, split=split)}
        for split in ("train", "held_out")
    )
    assert not train & held_out
    assert {text.split()[0] for text in train} == {"append", "write", "copy", "move", "remove"}


def test_demonstrations_mostly_read_nothing() -> None:
    examples = note_demonstrations(count=200, seed=0, reader=NoteReader(p_hasty=0.75))
    first = [json.loads(each["messages"][1]["tool_calls"][0]["function"]["arguments"])["command"] for each in examples]
    assert 30 <= sum(command.startswith("cat ") for command in first) <= 70


def test_a_demonstration_is_few_tokens_and_round_trips(tmp_path: Path) -> None:
    write_terminal_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = '{"name": "bash", "arguments": {"command": "echo 42 >> blue"}}'
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) <= 12


@pytest.mark.starts
@pytest.mark.anyio
async def test_outputs_of_demonstrations_are_those_of_the_container() -> None:
    rng = random.Random(0)
    async with open_containers(images={"debian:12": None}) as containers:
        for task in note_tasks(count=5, seed=3):
            folder = Path(task["folder"])
            harbor = read_harbor_folder(folder)
            messages = demonstrate_note(task["note"], note_of(dict(task.data)), NoteReader(p_hasty=0, p_slip=0), rng)
            opened = TaskBenches(containers).opened(harbor, SCRIPT_LIMITS)
            async with opened as bench, bench.run(directory="/app") as container:
                screen = Screen(container, max_chars=200)
                for call, reply in zip(messages[1:-1:2], messages[2:-1:2], strict=True):
                    command = json.loads(call["tool_calls"][0]["function"]["arguments"])["command"]
                    assert await screen.bash(command) == reply["content"]
            wrong = random_note(rng)
            while wrong == note_of(dict(task.data)):
                wrong = random_note(rng)
            assert (await play_script(containers, folder, wrong.command)).reward == 0.0
            assert (await play_script(containers, folder, note_of(dict(task.data)).command)).reward == 1.0
