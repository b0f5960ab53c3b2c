"""A model call, a weight update, a group on its way to the loss and a start enter few files (docs/adr/0012-rooms-by-job.md).

The counts may only fall. Those on the shipped path have the trainer in its process, whose files count too, and records on.
A journey is recorded when it has run before, so that what is prepared once does not count; of a start all counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from tokenizers import Tokenizer

from agentrl import Client, RolloutWorkflow, Task, tool
from agentrl.algo.config import AlgorithmConfig
from agentrl.client import MessageLike, SamplingConfig
from agentrl.engine.config import EngineConfig
from agentrl.engine.publishing import WeightPublisher
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.pool.pool import ServerPool
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.script import Script
from agentrl.servers.scripted.socket_server import serve_scripted
from agentrl.tokens.renderer import Renderer
from agentrl.trainer.base import StepReport, TrainBatch
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.policy import PolicyTrainer
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.types import Float32Array, Int32Array
from agentrl.weights.types import Publication
from tests.engine.harness import ANY_PROBE, make_engine
from tests.rollout.harness import make_server
from tests.support.cli import started
from tests.support.journeys import JourneyRecorder, ProcessRecordings, environment, profiled

MAX_FILES_PER_CALL = 21
"""Driver side: from `chat.completions.create` to the server's socket and back, in the third turn of an episode."""
MAX_FILES_PER_UPDATE = 14
"""Driver side: from `WeightPublisher.hold`, with the files written, until every server samples with the new weights."""
MAX_FILES_PER_GROUP = 41
"""From the end of a group's last episode through buffer, batch and advantages to the end of the optimizer step."""
MAX_FILES_PER_SHIPPED_UPDATE = 32
"""From `WeightPublisher.hold` until every server samples with the new weights, with the trainer in its process."""
MAX_FILES_PER_SHIPPED_GROUP = 54
"""As `MAX_FILES_PER_GROUP`, with the trainer in its process and records of episodes."""
MAX_FILES_PER_START = 109
"""Driver side: from `python -m agentrl train FILE` until a workflow runs; the imports of modules do not count."""
TURNS = 3
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture
def anyio_backend() -> str:
    """The pool's HTTP client needs asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def renderer(checkpoint: Path) -> Renderer:
    return Renderer.load(checkpoint)


@pytest.fixture(scope="module")
def script(checkpoint: Path) -> Script:
    """Every answer is a tool call, as ids: in text from a script, markup is not control tokens."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    reply = tokenizer.encode(f"{CALL}<|im_end|>", add_special_tokens=False).ids
    return lambda _: reply


@tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class ToolLoop(RolloutWorkflow):
    """Calls a tool in every turn; each call is recorded. Episodes are worth 0 and 1 in turn."""

    def __init__(self, recorder: JourneyRecorder | None = None) -> None:
        self._recorder = recorder or JourneyRecorder()
        self._episodes = 0

    async def run(self, task: Task, client: Client) -> float:
        messages: list[MessageLike] = [{"role": "user", "content": task["question"]}]
        for _ in range(TURNS):
            self._recorder.start()
            completion = await client.chat.completions.create(messages=messages, tools=[add.schema], max_tokens=200)
            self._recorder.stop()
            message = completion.choices[0].message
            assert message.tool_calls
            messages += [message, *[await add.reply(call) for call in message.tool_calls]]
        self._episodes += 1
        return float(self._episodes % 2)


class RecordedPool:
    """A pool that starts a recording whenever an episode has ended: the last one before a step is that of its group."""

    def __init__(self, pool: ServerPool, recorder: JourneyRecorder) -> None:
        self.generate, self.stream, self.update_weights = pool.generate, pool.stream, pool.update_weights
        self._pool, self._recorder = pool, recorder

    @property
    def policy_version(self) -> int:
        return self._pool.policy_version

    def release(self, episode_id: str) -> None:
        self._recorder.start()
        self._pool.release(episode_id)


class InProcessTrainer(ScriptedTrainer):
    """A trainer with a real optimizer step, in the test's own process; each step ends a recording."""

    def __init__(self, policy: PolicyTrainer, recorder: JourneyRecorder) -> None:
        super().__init__()
        self.reports: list[StepReport] = []
        self._policy, self._recorder = policy, recorder

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        return self._policy.logprobs(sequences, temperatures)

    async def step(self, batch: TrainBatch) -> StepReport:
        self.reports.append(self._policy.step(batch))
        self._recorder.stop()
        return self.reports[-1]


class WrittenTrainer(ScriptedTrainer):
    """A trainer whose publications are on disk before they are asked for, as the trainer process leaves them."""

    def __init__(self, written: Mapping[int, Publication]) -> None:
        super().__init__()
        self._written = written

    async def hold(self, version: int, *, dtype: str | None) -> None:
        assert version in self._written

    async def publish(self, version: int, directory: str) -> Publication:
        return self._written[version]

    async def logprobs(
        self, sequences: Sequence[Int32Array], temperatures: Sequence[float] | None = None
    ) -> list[Float32Array]:
        return [np.full(len(ids) - 1, -1.0, np.float32) for ids in sequences]


@pytest.fixture
def servers(renderer: Renderer, script: Script) -> Generator[InferenceConfig]:
    """Two scripted servers over HTTP, in a thread of their own."""
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal("asyncio"))
        urls: list[str] = []
        for _ in range(2):
            server = portal.call(make_server, renderer, script)
            urls.append(stack.enter_context(portal.wrap_async_context_manager(serve_scripted(server))).url)
        yield InferenceConfig(urls=tuple(urls), health_interval_s=300)


class RecordedTrainer(ScriptedTrainer):
    """A trainer in its process, each step of which ends a recording."""

    def __init__(self, trainer: RemoteTrainer, recorder: JourneyRecorder) -> None:
        super().__init__()
        self.reports: list[StepReport] = []
        self._trainer, self._recorder = trainer, recorder
        self.hold, self.publish, self.logprobs = trainer.hold, trainer.publish, trainer.logprobs

    async def step(self, batch: TrainBatch) -> StepReport:
        self.reports.append(await self._trainer.step(batch))
        self._recorder.stop()
        return self.reports[-1]


@asynccontextmanager
async def worker(checkpoint: Path, folder: Path, algorithm: Mapping[str, object]) -> AsyncGenerator[RemoteTrainer]:
    async with launch_trainer(
        TrainerConfig(),
        AlgorithmConfig.model_validate(algorithm),
        model_path=checkpoint,
        total_steps=2,
        seed=0,
        log_path=folder / "trainer.log",
    ) as trainer:
        yield trainer


@pytest.fixture
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which processes that the test starts record the files that they enter."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def check_limit(files: set[str], limit: int, name: str) -> None:
    """Check a count that varies a little: signs of life are seen in a journey, or are not."""
    assert len(files) <= limit, f"{name} allows {limit} files and may only fall; {len(files)}:\n" + "\n".join(sorted(files))


def check_count(files: set[str], limit: int, name: str) -> None:
    listing = "\n".join(sorted(files))
    assert len(files) <= limit, f"{name} allows {limit} files and may only fall; {len(files)} are entered:\n{listing}"
    assert len(files) == limit, (
        f"set {name} to {len(files)}, which is lower than {limit}; these files are entered:\n{listing}"
    )


async def test_a_model_call_enters_few_files(servers: InferenceConfig, checkpoint: Path, renderer: Renderer, tmp_path: Path):
    with profiled() as recorder:
        workflow = ToolLoop(recorder)
        vocab_size = renderer.vocab_size
        async with launch_pool(servers, model_path=checkpoint, vocab_size=vocab_size, log_dir=tmp_path) as pool:
            for episode in ("the first", "another"):
                trajectory = await run_policy_episode(
                    workflow,
                    Task(id=episode, data={"question": "1 + 2?"}),
                    backend=pool,
                    renderer=renderer,
                    rollout=RolloutConfig(),
                    sampling=SamplingConfig(),
                )
                assert trajectory.failure is None
                assert len(trajectory.turns) == TURNS
    check_count(recorder.files, MAX_FILES_PER_CALL, "MAX_FILES_PER_CALL")


async def test_a_weight_update_enters_few_files(
    servers: InferenceConfig, checkpoint: Path, renderer: Renderer, tmp_path: Path
):
    writer = ScriptedTrainer()
    trainer = WrittenTrainer({version: await writer.publish(version, str(tmp_path / "written")) for version in (1, 2)})
    serving = launch_pool(servers, model_path=checkpoint, vocab_size=renderer.vocab_size, log_dir=tmp_path)
    with profiled() as recorder:
        async with serving as pool:
            config = EngineConfig(probe_tolerance=ANY_PROBE)
            publisher = WeightPublisher(
                trainer=trainer, inference=pool, run_dir=tmp_path, config=config, probe_ids=[1, 2, 3, 4]
            )
            await publisher.send(await publisher.hold(1), beside=False)
            recorder.start()
            await publisher.send(await publisher.hold(2), beside=False)
            recorder.stop()
            status = pool.describe()
    assert [(server.version, server.paused) for server in status.servers] == [(2, False), (2, False)]
    check_count(recorder.files, MAX_FILES_PER_UPDATE, "MAX_FILES_PER_UPDATE")


async def test_a_group_enters_few_files_on_its_way_to_the_loss(
    checkpoint: Path, renderer: Renderer, script: Script, tmp_path: Path
):
    algorithm = {"group_size": 2, "groups_per_step": 1, "max_staleness": 0}
    policy = PolicyTrainer(
        PolicyModel(checkpoint, device=torch.device("cpu")),
        TrainerConfig(),
        AlgorithmConfig.model_validate(algorithm),
        total_steps=2,
    )
    with profiled() as recorder:
        trainer = InProcessTrainer(policy, recorder)
        async with ServerPool([make_server(renderer, script)], InferenceConfig(health_interval_s=300)) as pool:
            engine = make_engine(
                tmp_path,
                renderer,
                workflow=ToolLoop(),
                inference=RecordedPool(pool, recorder),
                trainer=trainer,
                steps=2,
                algorithm=algorithm,
                rollout={"max_concurrent_episodes": 1},
                # The server answers from a script, not with the trainer's model. Records of episodes are written beside.
                engine={"logprob_tolerance": ANY_PROBE, "save_trajectories": False},
            )
            await engine.run()
    assert [report.skipped for report in trainer.reports] == [None, None]
    check_count(recorder.files, MAX_FILES_PER_GROUP, "MAX_FILES_PER_GROUP")


@pytest.mark.starts
async def test_a_weight_update_of_a_trainer_in_its_process_enters_few_files(
    servers: InferenceConfig, checkpoint: Path, renderer: Renderer, tmp_path: Path, recordings: Path
):
    serving = launch_pool(servers, model_path=checkpoint, vocab_size=renderer.vocab_size, log_dir=tmp_path)
    with profiled(recordings) as recorder:
        async with worker(checkpoint, tmp_path, {}) as trainer, serving as pool:
            config = EngineConfig(probe_tolerance=ANY_PROBE)
            publisher = WeightPublisher(
                trainer=trainer, inference=pool, run_dir=tmp_path, config=config, probe_ids=[1, 2, 3, 4]
            )
            await publisher.send(await publisher.hold(1), beside=False)
            entered: list[set[str]] = []
            for version in (2, 3, 4):  # signs of life, which come beside any of them, are no part of an update
                recorder.start()
                await publisher.send(await publisher.hold(version), beside=False)
                recorder.stop()
                entered.append(recorder.files)
            status = pool.describe()
    files = set.intersection(*entered)
    assert [server.version for server in status.servers] == [4, 4]
    assert "trainer/worker/process.py" in files
    check_limit(files, MAX_FILES_PER_SHIPPED_UPDATE, "MAX_FILES_PER_SHIPPED_UPDATE")


@pytest.mark.starts
async def test_a_group_enters_few_files_on_its_way_to_the_loss_in_the_trainer_s_process(
    checkpoint: Path, renderer: Renderer, script: Script, tmp_path: Path, recordings: Path
):
    algorithm = {"group_size": 2, "groups_per_step": 1, "max_staleness": 0}
    with profiled(recordings) as recorder:
        async with (
            worker(checkpoint, tmp_path, algorithm) as trainer,
            ServerPool([make_server(renderer, script)], InferenceConfig(health_interval_s=300)) as pool,
        ):
            recorded = RecordedTrainer(trainer, recorder)
            engine = make_engine(
                tmp_path,
                renderer,
                workflow=ToolLoop(),
                inference=RecordedPool(pool, recorder),
                trainer=recorded,
                steps=2,
                algorithm=algorithm,
                rollout={"max_concurrent_episodes": 1},
                engine={"logprob_tolerance": ANY_PROBE},
            )
            await engine.run()
    assert [report.skipped for report in recorded.reports] == [None, None]
    assert "algo/loss.py" in recorder.files
    check_limit(recorder.files, MAX_FILES_PER_SHIPPED_GROUP, "MAX_FILES_PER_SHIPPED_GROUP")


_STOPS_WHEN_IT_RUNS = """
import os
from pathlib import Path

async def answer(task, client):
    Path("runs").joinpath("reached").touch()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.starts
def test_a_start_enters_few_files(servers: InferenceConfig, checkpoint: Path, tmp_path: Path, recordings: Path):
    tasks = [{"id": str(number), "question": "1 + 2?"} for number in range(2)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "flow.py").write_text(_STOPS_WHEN_IT_RUNS)
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "name": "start",
                "runs_dir": "runs",
                "workflow": "flow:answer",
                "model": {"path": str(checkpoint)},
                "tasks": {"path": "tasks.jsonl"},
                "inference": {"urls": servers.urls},
                "engine": {"steps": 1, "probe_tolerance": ANY_PROBE},
            }
        )
    )
    recording = ProcessRecordings(recordings)
    recording.start()
    with started(tmp_path, sys.executable, "-m", "agentrl", "train", "run.yaml") as process:
        said = process.communicate(timeout=300)
    files = recording.stop(process.pid)
    assert (tmp_path / "runs" / "reached").exists(), said
    check_limit(files, MAX_FILES_PER_START, "MAX_FILES_PER_START")
