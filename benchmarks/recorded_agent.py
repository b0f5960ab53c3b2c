"""A training step on what a real coding CLI did, with and without shared prefixes.

Run: `make clients-install`, then `python -m benchmarks.recorded_agent`. It prints a row for each CLI and writes
benchmarks/results/recorded_agent.json.

Claude Code and opencode play one task several times, each through a door. A script answers in place of a model: the agent
starts a sub-agent, both run commands that print source code, another part of it in each episode, and the agent ends. All
episodes have one working directory, as in a sandbox: CLIs name it early in their first message. The recorded ids are those
of a tokenizer like Qwen's with 16,384 words. Their samples, those of a group, are one batch of
`benchmarks.shared_prefixes`, which says what the columns mean; one pass may take all of it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import anyio
import numpy as np
import torch
from transformers.utils import logging

from agentrl.client import Client, DoorSettings, EpisodeSettings, PolicyBackend, SideCalls
from agentrl.rollout.scripted_policy import UNLIMITED
from agentrl.servers.scripted.script import ScriptedCall
from agentrl.servers.scripted.server import ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.trainer.base import TrainBatch, TrainSample
from agentrl.types import Sample, StopReason
from benchmarks.instant_model import VOCABULARY, save_tokenizer, standard_library
from benchmarks.machine import describe_machine
from benchmarks.shared_prefixes import measure
from benchmarks.trainer import Case, checkpoint
from tests.clients.catalog import CLIENTS, TASK, tool_call
from tests.clients.harness import run_program
from tests.support.scripted import pool_of

RESULTS = Path(__file__).parent / "results" / "recorded_agent.json"
SUBTASK = "Say how long the module is."
COMMANDS, LINES = 4, 60
"""Commands of the agent and of its sub-agent, and the lines that each prints."""
POSITIONS = 65_536
DEADLINE_S = 300.0
TITLES = ("title generator", "sentence-case title")
"""Words of the calls with which the CLIs ask for a title."""


class Agent(NamedTuple):
    """The way in which a CLI runs a command and starts a sub-agent."""

    command: str
    """The tool's name."""
    sub_agent: str
    """The call that starts one."""


AGENTS = {
    "Claude Code": Agent(
        "Bash",
        tool_call("Agent", json.dumps({"description": "measure", "prompt": SUBTASK, "subagent_type": "general-purpose"})),
    ),
    "opencode": Agent(
        "bash", tool_call("task", json.dumps({"description": "measure", "prompt": SUBTASK, "subagent_type": "general"}))
    ),
}


def reply(agent: Agent, number: int, prompt: str) -> str:
    """Return what the model says in episode `number`, which its prompt decides."""
    if any(words in prompt for words in TITLES):
        return '{"title": "Greetings"}'
    is_sub_agent = TASK not in prompt
    done = prompt.count("<tool_response>")
    if not is_sub_agent and done == 0:
        return f"Attempt {number} begins with help.\n{agent.sub_agent}"
    if done < COMMANDS + (not is_sub_agent):
        file = Path(sysconfig.get_path("stdlib")) / ("argparse.py" if is_sub_agent else "inspect.py")
        first = 1 + LINES * (COMMANDS * number + done)
        command = f"sed -n {first},{first + LINES - 1}p {file}"
        return f"I read on at line {first}.\n" + tool_call(
            agent.command, json.dumps({"command": command, "description": "Prints lines"})
        )
    return f"The module has more than {LINES * number} lines."


async def play(name: str, number: int, tokenizer: Path, folder: Path) -> Sequence[Sample]:
    """Return the samples of one episode of a CLI."""
    program = next(each for each in CLIENTS if each.client == name)
    program.check_installed()
    settings = {key: value for key, value in program.environment.items() if "NONESSENTIAL" not in key}
    command = tuple("40" if word == "8" else word for word in program.command)  # Claude Code's limit of turns
    program = replace(program, environment=settings, command=command)
    renderer = Renderer.load(tokenizer)

    def script(call: ScriptedCall) -> str:
        return reply(AGENTS[name], number, renderer.decode(call.input_ids.tolist(), skip_special=False))

    server = ScriptedServer(script, vocab_size=VOCABULARY, encode=renderer.encode_content, eos_id=min(renderer.eos_ids))
    rules = DoorSettings(branches=("subagent",), side_calls=SideCalls(roles=("title",)))
    with anyio.fail_after(DEADLINE_S):
        async with pool_of(server, request_timeout_s=DEADLINE_S) as pool:
            sampling = UNLIMITED.model_copy(update={"unsupported": "prompt"})
            client = Client(PolicyBackend(pool, renderer, sampling, EpisodeSettings(episode_id=str(number), task_id="t")))
            async with client.served(rules) as door:
                status, output = await run_program(program, door, folder)
    if status:
        raise RuntimeError(f"{name} ended with status {status}: {output[-2000:]}")
    trajectory = client.close(StopReason.COMPLETED, float(number % 2))
    samples = verify(trajectory)
    return [one for one in samples if not trajectory.turns[one.turn_index.max()].left_out]


def batch_of(samples: Sequence[Sample]) -> TrainBatch:
    """Return the batch of samples under version 1, with an advantage for each."""
    random = np.random.default_rng(0)
    return TrainBatch(
        samples=tuple(
            TrainSample(
                sample=replace(one, token_versions=np.where(one.loss_mask, 1, -1).astype(np.int32)),
                advantages=np.where(one.loss_mask, random.normal(), 0).astype(np.float32),
            )
            for one in samples
        ),
        policy_version=1,
    )


async def recorded(name: str, episodes: int, tokenizer: Path, folder: Path) -> Sequence[Sample]:
    """Return the samples of a group, whose episodes a CLI plays one after another in a folder of one name."""
    samples: list[Sample] = []
    for number in range(episodes):
        home = folder / "episode"
        home.mkdir()
        samples += await play(name, number, tokenizer, home)
        shutil.rmtree(home)
    return samples


def main() -> None:
    """Record, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        save_tokenizer(tokenizer, standard_library())
        model = checkpoint(
            Case(name="model", hidden=64, layers=1, vocab=VOCABULARY, lengths=(), positions=POSITIONS), folder
        )
        for name in AGENTS:
            samples = anyio.run(recorded, name, options.episodes, tokenizer, folder)
            lengths = [len(sample.token_ids) for sample in samples]
            print(f"{name}: {len(samples)} samples of {lengths} tokens", flush=True)
            row = measure(model, batch_of(samples), options.repeats, microbatch_tokens=max(POSITIONS, sum(lengths)))
            rows[name] = {"samples": len(samples), **row}
            print(f"{name}: {json.dumps(row)}", flush=True)
    report = {"machine": describe_machine("torch"), "threads": 1, "episodes": options.episodes, "cases": rows}
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
