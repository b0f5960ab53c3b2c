"""Six journeys with defaults enter as many files as their budgets say, and none of a feature that is off (ADR 44).

The budgets and the files of each feature stand in journeys.toml. A journey is recorded when it has run before, so that what
is prepared once does not count; of a start all counts. The files of the trainer's process count too.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from tokenizers import Tokenizer

from agentrl import Client, RolloutWorkflow, Task, tool
from agentrl.algo.config import AlgorithmConfig
from agentrl.client import EpisodeSettings, MessageLike, PolicyBackend, SamplingConfig
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
from agentrl.trainer.scripted import ScriptedTrainer
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl_testing import call, play_async
from agentrl_workflows.terminal import TerminalAgent
from tests.engine.harness import ANY_PROBE, make_engine
from tests.rollout.harness import make_server
from tests.support.cli import started
from tests.support.doors import door_client
from tests.support.journeys import PACKAGES, JourneyRecorder, ProcessRecordings, environment, profiled
from tests.support.terminal import write_problem

BUDGETS = tomllib.loads((Path(__file__).parent / "journeys.toml").read_text())
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
def recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts_truly: None) -> Path:
    """A folder in which processes that the test starts record the files that they enter."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    for name, value in environment(folder).items():
        monkeypatch.setenv(name, value)
    return folder


def check(journey: str, files: set[str]) -> None:
    """Check what a journey entered; files of the test's server and of signs of life do not count."""
    listing = "\n".join(sorted(files))
    entered = {f"{feature}: {file}" for feature, own in BUDGETS["features"].items() for file in files.intersection(own)}
    assert not entered, f"a {journey} enters files of features that are off: {sorted(entered)}"
    counted = {file for file in files - set(BUDGETS["sometimes"]) if not file.startswith("agentrl/servers/scripted/")}
    count, budget = len(counted), BUDGETS["budgets"][journey]
    assert count == budget, f"a {journey} enters {count} files, and journeys.toml allows {budget}:\n{listing}"


def test_the_files_of_each_feature_exist():
    folders = {Path(package).name: Path(package) for package in PACKAGES}
    named = (*BUDGETS["sometimes"], *[file for own in BUDGETS["features"].values() for file in own])
    found = [folders[name.partition("/")[0]] / name.partition("/")[2] for name in named]
    assert [str(file) for file in found if not file.is_file()] == []


async def test_a_model_call_enters_the_files_of_its_budget(
    servers: InferenceConfig, checkpoint: Path, renderer: Renderer, tmp_path: Path
):
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
    check("call", recorder.files)


@pytest.mark.starts
async def test_a_weight_update_enters_the_files_of_its_budget(
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
    assert "agentrl/trainer/worker/process.py" in files
    check("update", files)


@pytest.mark.starts
async def test_a_group_enters_the_files_of_its_budget_on_its_way_to_the_loss(
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
    assert "agentrl/algo/losses.py" in recorder.files
    check("group", recorder.files)


_STOPS_WHEN_IT_RUNS = """
import os
from pathlib import Path

async def answer(task, client):
    Path("runs").joinpath("reached").touch()
    os.kill(os.getpid(), 9)
"""


@pytest.mark.starts
def test_a_start_enters_the_files_of_its_budget(
    servers: InferenceConfig, checkpoint: Path, tmp_path: Path, recordings: Path
):
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
    check("start", files)


async def test_a_call_through_a_door_enters_the_files_of_its_budget(
    servers: InferenceConfig, checkpoint: Path, renderer: Renderer, tmp_path: Path
):
    """A program's call over HTTP, from its body to the server's socket and back; the third call of an episode."""
    serving = launch_pool(servers, model_path=checkpoint, vocab_size=renderer.vocab_size, log_dir=tmp_path)
    with profiled() as recorder:
        async with serving as pool:
            settings = EpisodeSettings(episode_id="e", task_id="t")
            client = Client(PolicyBackend(pool, renderer, SamplingConfig(max_tokens=200), settings))
            async with client.served() as door, door_client(door) as program:
                history: list[Any] = []
                for number in range(TURNS):
                    history += [{"role": "user", "content": f"Say {number}."}]
                    recorder.start()
                    answer = await program.chat.completions.create(model="any", messages=history)
                    recorder.stop()
                    history += [answer.choices[0].message.model_dump(exclude_none=True)]
    assert len(client.turns) == TURNS
    check("door", recorder.files)


@pytest.mark.starts
async def test_a_terminal_episode_enters_the_files_of_its_budget(tmp_path: Path):
    """Two commands in bubblewrap, judged by the task's tests; the second episode of a task."""
    task = write_problem(tmp_path, "count-lines")
    replies = [call("bash", command="cd /app"), call("bash", command="wc -l < data.txt > count.txt"), "Done."]
    with profiled() as recorder:
        for _ in range(2):
            recorder.start()
            played = await play_async(TerminalAgent, task, replies, workflow_args={"images": {"debian:12": None}})
            recorder.stop()
            assert played.final_reward == 1.0
    # The workflow is the user's part, and a script plays the model.
    others = ("agentrl_workflows/", "agentrl/servers/", "agentrl/inference/", "agentrl/rollout/scripted_policy.py")
    check("terminal", {file for file in recorder.files if not file.startswith(others)})
