"""CPU time of the driver for one model call, with episodes in its own process and in a worker process.

Run: `python -m benchmarks.rollout_workers` (two minutes; `--repeats 5` for less). It prints a table and writes
benchmarks/results/rollout_workers.json. Each episode grows to the given context in 8 turns; the backend, in the driver,
answers at once. CPU is `time.process_time` of the driver, whose share of a call through a worker is to read its token ids,
to call the backend and to pass on the reply. The pool's HTTP call to a server comes on top of both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import anyio

from agentrl.client import Client, SamplingConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import LocalRunner, PolicyRunner
from agentrl.rollout.remote.frames import WorkerSetup
from agentrl.rollout.remote.runner import RemoteRunner, this_machine
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task, Turn
from agentrl.workflow import RolloutWorkflow
from benchmarks.instant_model import TRAINED_ON, Corpus, Instant, answer, save_tokenizer, standard_library
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "rollout_workers.json"
TURNS = 8
ANSWER_TOKENS = 64
CONTEXTS = (4096, 16384, 32768)
SAMPLING = SamplingConfig(max_tokens=256)


class Talk(RolloutWorkflow):
    """Says each of the task's texts, and pays 1 at the end."""

    async def run(self, task: Task, client: Client) -> float:
        """Play one episode."""
        messages: list[dict[str, object]] = []
        for text in task["texts"]:
            messages.append({"role": "user", "content": text})
            completion = await client.chat.completions.create(messages=messages)
            messages.append({"role": "assistant", "content": completion.choices[0].message.content})
        return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = anyio.run(_measure, options.repeats)
    options.output.write_text(
        json.dumps({"machine": describe_machine("anyio", "msgspec"), "repeats": options.repeats, "rows": rows}, indent=1)
        + "\n"
    )
    print("context  local ms  worker ms  worker / local")
    for row in rows:
        print(f"{row['context']:>7}  {row['local_ms']:>8.3f}  {row['worker_ms']:>9.3f}  {row['ratio']:>14.2f}")


async def _measure(repeats: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        text = standard_library()
        tokenizer, _ = save_tokenizer(Path(folder), text)
        renderer = Renderer.load(folder)
        corpus = Corpus(text[TRAINED_ON:])
        end = renderer.end_of_turn_id
        assert end is not None
        answers = [answer(tokenizer.encode(corpus.take(400)).ids[:ANSWER_TOKENS], end) for _ in range(61)]
        rollout = RolloutConfig()
        local = LocalRunner(Talk(), renderer=renderer, rollout=rollout, seed=0)
        setup = WorkerSetup(
            name="",
            directory=str(Path.cwd()),
            workflow="benchmarks.rollout_workers:Talk",
            workflow_args="{}",
            model=folder,
            template_options="{}",
            max_context=None,
            rollout=rollout.model_dump_json(),
            seed=0,
            stall_timeout_s=600.0,
        )
        remote = RemoteRunner(setup, num_workers=1, nodes=this_machine, log_dir=Path(folder))
        per_token = len(text[: 10**6]) / len(tokenizer.encode(text[: 10**6]).ids)
        rows: list[dict[str, float]] = []
        async with local.opened(Instant(answers)), remote.opened(Instant(answers)):
            for context in CONTEXTS:
                size = int((context / TURNS - ANSWER_TOKENS) * per_token)
                tasks = [
                    Task(id=str(number), data={"texts": [corpus.take(size) for _ in range(TURNS)]})
                    for number in range(repeats)
                ]
                local_ms, worker_ms = [await _cost(runner, tasks) for runner in (local, remote)]
                ratio = worker_ms / local_ms
                rows.append({"context": context, "local_ms": local_ms, "worker_ms": worker_ms, "ratio": ratio})
        return rows


async def _cost(runner: PolicyRunner, tasks: list[Task]) -> float:
    """Return the driver's CPU for a model call, milliseconds: the median over episodes."""

    def ignore(turn: Turn) -> None:
        pass

    spent: list[float] = []
    for task in tasks:
        begin = time.process_time()
        trajectory = await runner.play(task, episode_id=task.id, sampling=SAMPLING, on_turn=ignore)
        spent.append(time.process_time() - begin)
        assert trajectory.failure is None, trajectory.failure
    return 1000 * median(spent) / TURNS


if __name__ == "__main__":
    main()
