"""A run that ends in the middle and continues: which tasks are trained, under which versions."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from agentrl.engine.parts import RunState
from agentrl.errors import TrainError
from agentrl.servers.scripted.server import ScriptedCall
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import TrainBatch
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Task
from tests.engine.harness import lines, make_engine, run
from tests.rollout.harness import make_server

STEPS = 8
TASKS = [Task(id=f"t{i}", data={"question": f"Say good, {i}.", "answer": "good"}) for i in range(2 * STEPS)]
"""As many as a whole run of two groups a step trains, once each."""


def first_wins(call: ScriptedCall) -> str:
    """Answer right in the first episode of each group, so that no group has zero variance."""
    return "good" if call.episode_id.split(".")[1] == "0" else "bad"


def trained_tasks(renderer: Renderer, batches: list[TrainBatch]) -> Counter[int]:
    """Return how many episodes of each task are in the batches, by the number in the task's question."""
    texts = [
        renderer.decode(item.sample.token_ids.tolist(), skip_special=True) for batch in batches for item in batch.samples
    ]
    return Counter(int(number) for text in texts for number in re.findall(r"Say good, (\d+)\.", text))


@pytest.mark.parametrize("failing_step", [3, 5, 6])
async def test_an_asynchronous_run_that_fails_and_continues_trains_every_task_once(
    tmp_path: Path, renderer: Renderer, failing_step: int
) -> None:
    asynchronous, saving = {"max_staleness": 2}, {"checkpoint_every": 2}
    first = ScriptedTrainer(fail_steps={failing_step})
    server = make_server(renderer, first_wins)
    with pytest.raises(TrainError, match=f"step {failing_step} "):
        await run(
            make_engine(
                tmp_path, renderer, trainer=first, inference=server, tasks=TASKS, steps=STEPS,
                algorithm=asynchronous, engine=saving,
            )
        )  # fmt: skip
    state = RunState.from_note(first.notes[-1], where="here")
    assert state.step == failing_step // 2 * 2
    assert state.policy_version == first.batches[state.step - 1].policy_version + 1
    assert len(state.groups_open) == state.groups_admitted - 2 * state.step > 0, "rollouts were ahead of the trainer"

    second = ScriptedTrainer()
    server = make_server(renderer, first_wins)
    await run(
        make_engine(
            tmp_path, renderer, trainer=second, inference=server, tasks=TASKS, steps=STEPS,
            algorithm=asynchronous, engine=saving, resume=state,
        )
    )  # fmt: skip
    kept = [*first.batches[: state.step], *second.batches]
    assert trained_tasks(renderer, kept) == dict.fromkeys(range(len(TASKS)), 3)
    used = failing_step + 1  # as many steps published a version, after the first one
    begin = used + 1 if used > state.policy_version else state.policy_version
    versions = [*range(1, state.step + 1), *range(begin, begin + STEPS - state.step)]
    assert [batch.policy_version for batch in kept] == versions, "no version has two sets of weights"
    assert len(lines(tmp_path / "metrics.jsonl", "step")) >= STEPS
    times = [line["wall_s"] for line in lines(tmp_path / "metrics.jsonl")]
    assert times == sorted(times), "the run's clock continues"
