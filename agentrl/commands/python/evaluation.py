"""`agentrl.evaluate`: a workflow on tasks, against a checkpoint or an OpenAI-compatible endpoint, from Python.

Invariant: every episode that was asked for is in the report, also a failed one; nothing is trained.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.commands.evaluate import Target, check_target, choose_samples, play_episodes, server_logs
from agentrl.commands.python.arguments import GivenTasks, read_run
from agentrl.data.load import load_training
from agentrl.data.playable import playable_training
from agentrl.engine.evaluate import EvalReport


async def evaluate(
    workflow: object,
    tasks: GivenTasks,
    *,
    model: str | Path,
    endpoint: str | None = None,
    api_key_env: str | None = None,
    episodes: int | None = None,
    samples: int | None = None,
    greedy: bool = False,
    **overrides: object,
) -> EvalReport:
    """Play `workflow` on `tasks` and return the report: success rate, returns, and every episode.

    A failed episode has no result: `report.success_rate` is over the others, `report.failed` counts it, and
    `report.first_failed` shows why.

    Args:
        workflow: a RolloutWorkflow class or instance, an `async def solve(task, client) -> float`, or `module:Name`.
        tasks: a JSONL file, or a list of mappings or of `Task`.
        model: local HF checkpoint, which is served for the call; with `endpoint`, the name of the model there.
        endpoint: base URL of an OpenAI-compatible endpoint, such as `http://127.0.0.1:8000/v1`.
        api_key_env: environment variable with the endpoint's key; None: `OPENAI_API_KEY`, if that is set.
        episodes: how many; None: one for each task, or `samples`.
        samples: play each task so many times; `report.metrics()` then has `pass_at.K` and, where the workflow names answers
            (`client.final_answer`), `majority_rate`; `report.samples` has the episodes by task.
        greedy: sample at temperature 0.
        **overrides: fields of a run file, such as `sampling={"max_tokens": 64}` or `rollout__max_turns=4`.

    Raises:
        ConfigError: before anything is started; one line for each error, with the field and the fix.
        ServerError: no server could be started or reached.

    Cancellation: ends the episodes and the servers.
    """
    given = read_run("agentrl.evaluate", workflow, tasks, None, model, overrides)
    target = Target(endpoint=endpoint, model=str(model) if endpoint else None, api_key_env=api_key_env)
    key = check_target(given.config, target, episodes)
    if given.objects.tasks is None:
        training = playable_training(load_training(given.config.tasks), given.config.tasks, given.objects.workflow.refusal)
    else:
        training = given.objects.tasks.train
    played = training.first(-(-(episodes or 1) // (samples or 1))) if training.is_endless else training.finite
    if samples is None:
        count = len(played) if episodes is None else episodes
    else:
        played, count = choose_samples(played, episodes, samples, greedy=greedy)
    with server_logs(given.config) as logs:
        return await play_episodes(given.config, target, key, logs, given.objects.workflow, played, count, greedy)
