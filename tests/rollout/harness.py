"""A tokenizer, a scripted server and small workflows for the tests of the rollout and the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio

from agentrl.client import Client, SamplingConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import Script, ScriptedCall, ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Trajectory
from agentrl.workflow import RolloutWorkflow
from tests.support.tiny import build_tokenizer

T = TypeVar("T")
PATIENCE_S = 240.0
"""For whole runs, whose trainer, checkpoints and records wait for the disk dozens of times."""
TASK = Task(id="t0", data={"question": "Say good.", "answer": "good"})
SAMPLING = SamplingConfig(max_tokens=8)


def make_renderer(folder: Path) -> Renderer:
    """Return a renderer without a model: no torch."""
    from tokenizers import Tokenizer

    vocab_size = build_tokenizer(folder)
    eos = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    config = {"model_type": "qwen3", "vocab_size": vocab_size, "eos_token_id": eos, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return Renderer.load(folder)


def make_server(renderer: Renderer, script: Script, *, version: int = 0) -> ScriptedServer:
    """Return a server that answers from `script`, whose text is ended by the end-of-turn id."""
    [eos] = renderer.eos_ids
    return ScriptedServer(
        script, vocab_size=renderer.vocab_size, encode=renderer.encode_content, eos_id=eos, version=version
    )


def says(text: str) -> Script:
    """Return a script that always gives the same answer."""

    def script(call: ScriptedCall) -> str:
        return text

    return script


async def ask(client: Client, text: str) -> str:
    """Make one model call and return its text."""
    completion = await client.chat.completions.create(messages=[{"role": "user", "content": text}])
    return completion.choices[0].message.content or ""


class Judge(RolloutWorkflow):
    """Asks the task's question once and pays 1 for its answer."""

    async def run(self, task: Task, client: Client) -> float:
        return float(await ask(client, task["question"]) == task["answer"])


async def episode(
    workflow: RolloutWorkflow,
    renderer: Renderer,
    *,
    script: Script = says("good"),  # noqa: B008 - a pure function
    rollout: RolloutConfig | None = None,
    task: Task = TASK,
) -> Trajectory:
    """Run one episode against a scripted server."""
    with anyio.fail_after(PATIENCE_S):
        return await run_policy_episode(
            workflow,
            task,
            backend=make_server(renderer, script),
            renderer=renderer,
            rollout=rollout or RolloutConfig(episode_timeout_s=PATIENCE_S),
            sampling=SAMPLING,
            episode_id="e0",
        )


def workflow_of(run: Callable[[Task, Client], object]) -> RolloutWorkflow:
    """Return a workflow whose `run` returns, or awaits, what `run` gives: right or wrong."""

    class Given(RolloutWorkflow):
        async def run(self, task: Task, client: Client) -> float:
            result = run(task, client)
            if hasattr(result, "__await__"):
                result = await result  # pyright: ignore[reportGeneralTypeIssues, reportUnknownVariableType] - just checked
            return result  # pyright: ignore[reportReturnType] - wrong results are what is tested

    return Given()
