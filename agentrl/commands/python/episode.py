"""One episode from a notebook or a script: `trajectory = await agentrl.run_episode(Calculator(), task, model="./model")`.

With `replies=["..."]` in place of `model`, a script answers and no model is needed.

Invariant: a server that the call starts has ended when the call returns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.client.config import SamplingConfig
from agentrl.config.names import local_model
from agentrl.errors import ConfigError
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.processes.watchdog.delays import blocks_named, coroutines_traced
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.rollout.scripted_policy import UNLIMITED, ScriptedPolicy, replies_in_order
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Trajectory
from agentrl.workflow import as_workflow


async def run_episode(
    workflow: object,
    task: Task,
    *,
    model: str | Path | None = None,
    replies: Sequence[str] | None = None,
    url: str | None = None,
    sampling: SamplingConfig | None = None,
    workflow_args: dict[str, Any] | None = None,
) -> Trajectory:
    """Return the trajectory of one episode; a failed one has `failure` set.

    Args:
        workflow: a RolloutWorkflow class or instance, or an `async def solve(task, client) -> float`.
        task: the task of the episode.
        model: local HF checkpoint or GGUF file; its tokenizer and chat template are used, and without `url` it is served.
        replies: answers of a scripted policy, one for each model call, in place of a model. A tool call is
            `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in the text.
        url: base URL of a running SGLang or embedded server that serves `model`; None starts an embedded server.
        sampling: defaults of the model calls.
        workflow_args: as in a run file.

    Raises:
        ConfigError: the workflow or the model cannot be used, or not exactly one of `model` and `replies` is given.
        ServerError: no server could be started or reached.

    Cancellation: ends the episode and the server.
    """
    flow = as_workflow(workflow, workflow_args)
    rollout = RolloutConfig()
    if replies is not None and model is None and url is None:
        policy = ScriptedPolicy(replies_in_order(replies))
        async with flow.opened():
            with blocks_named(), coroutines_traced():
                return await run_policy_episode(
                    flow, task, backend=policy, renderer=policy.renderer, rollout=rollout, sampling=sampling or UNLIMITED
                )
    if model is None or replies is not None:
        raise ConfigError("run_episode: pass either model, a local checkpoint, or replies, the answers of a script")
    chosen = sampling or SamplingConfig()
    model = local_model(str(model))
    renderer = Renderer.load(model, template_options=chosen.template_options, tool_format=chosen.tool_format)
    inference = InferenceConfig(urls=(url,) if url else ())
    with tempfile.TemporaryDirectory(prefix="agentrl-") as logs:
        serving = launch_pool(inference, model_path=model, vocab_size=renderer.vocab_size, log_dir=logs)
        async with serving as pool, flow.opened():
            with blocks_named(), coroutines_traced():
                return await run_policy_episode(
                    flow,
                    task,
                    backend=pool,
                    renderer=renderer.within(pool.max_context_tokens),
                    rollout=rollout,
                    sampling=sampling or SamplingConfig(),
                )
