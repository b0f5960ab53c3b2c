"""A run of the smallest demo whose server, engine and trainer are in this process: no start is paid for, one core is used.

Invariant: model, workflow, client, engine, HTTP server and trainer are those of a run; only checkpoints are not written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import torch

from agentrl.algo.config import AlgorithmConfig
from agentrl.config import RunConfig, load_config
from agentrl.data.load import load_held_out, load_tasks
from agentrl.engine.engine import Engine
from agentrl.engine.evaluate import EvalReport, evaluate_policy
from agentrl.engine.parts import EngineParts
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.observe.progress import NoProgress
from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions
from agentrl.servers.serve import serving
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.disk import publish
from agentrl.weights.types import Publication
from agentrl.workflow import load_workflow
from agentrl_workflows.calculator.recipe import SMOKE


def smoke_run(student: Path, runs: Path, algorithm: Mapping[str, object], flags: Mapping[str, object]) -> RunConfig:
    """Return the run of the smallest demo from the warm start `student`, with `algorithm` and other settings by name."""
    settings: dict[str, object] = {
        "model.path": student,
        "runs_dir": runs,
        "name": "smoke",
        **SMOKE.overrides,
        "engine.eval_every": 0,
        **flags,
    }
    run = load_config(SMOKE.run_file, [part for name, value in settings.items() for part in (f"--{name}", str(value))])
    return run.model_copy(update={"algorithm": AlgorithmConfig.model_validate(dict(algorithm))})


class TrainerHere(ScriptedTrainer):
    """A trainer whose model and optimizer are in this process; its checkpoints are scripted."""

    def __init__(self, run: RunConfig) -> None:
        """Load the model of `run`."""
        super().__init__()
        self.reports: list[StepReport] = []
        self.model = PolicyModel(run.model.directory, device=torch.device("cpu"))
        self._policy = PolicyTrainer(self.model, run.trainer, run.algorithm, total_steps=run.engine.steps, seed=run.seed)

    async def step(self, batch: TrainBatch) -> StepReport:
        """Train on `batch` in a thread."""
        self.reports.append(await anyio.to_thread.run_sync(self._policy.step, batch))
        return self.reports[-1]

    async def publish(self, version: int, directory: str) -> Publication:
        """Write the present weights."""
        return publish(self.model.export(), version=version, directory=Path(directory), source=Path(self.model.path), keep=3)

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        """Return the log-probs under the present weights."""
        return self._policy.logprobs(sequences, temperatures)

    async def values(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Return the values of the present critic."""
        return self._policy.values(sequences)


@asynccontextmanager
async def _pool(model: str | Path, run: RunConfig, renderer: Renderer) -> AsyncGenerator[ServerPool]:
    options = EngineOptions(model_path=str(model), max_running_requests=64, device="cpu", random_seed=run.seed)
    async with (
        serving(EmbeddedEngine(options)) as url,
        ServerPool([SGLangServer(url, vocab_size=renderer.vocab_size)], run.inference) as pool,
    ):
        yield pool


async def train_here(
    run: RunConfig, *, evaluated: int = 0, trainer: TrainerHere | None = None
) -> tuple[TrainerHere, EvalReport | None]:
    """Train as `run` says, with a `trainer` of one's own or a new one.

    Returns:
        The trainer with its reports, and the final weights on `evaluated` held-out episodes.
    """
    torch.manual_seed(run.seed)
    renderer = Renderer.load(run.model.directory, max_context=512)
    trainer, workflow = trainer or TrainerHere(run), load_workflow(run.workflow, run.workflow_args)
    async with _pool(run.model.directory, run, renderer) as pool:
        parts = EngineParts(
            workflow=workflow,
            tasks=load_tasks(run.tasks).train,
            inference=pool,
            renderer=renderer,
            trainer=trainer,
            run_dir=run.run_dir,
            algorithm=run.algorithm,
            rollout=run.rollout,
            sampling=run.sampling,
            engine=run.engine,
            compute_type=run.compute_type,
            seed=run.seed,
            progress=NoProgress(),
        )
        await Engine(parts).run()
        if not evaluated:
            return trainer, None
        report = await evaluate_policy(
            workflow,
            load_held_out(run.tasks),
            backend=pool,
            renderer=renderer,
            rollout=run.rollout,
            sampling=run.sampling,
            episodes=evaluated,
            seed=run.seed,
        )
    return trainer, report
