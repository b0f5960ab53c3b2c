"""Weights broadcast to real embedded servers: exactness, servers that die or stop midway, cancellation, a real worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.algo.config import AlgorithmConfig
from agentrl.errors import ServerTimeout, TrainError, WeightSyncError
from agentrl.inference.backend import Generation, LogprobTolerance, Probe
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import GroupCalls, SGLangServer
from agentrl.inference.sglang.transport import Control, Transport
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.weights.config import SyncConfig
from agentrl.weights.disk import publish
from agentrl.weights.tensors import read_safetensors
from agentrl.weights.types import GroupAddress, WeightFeed
from tests.support.channel import LocalTrainer
from tests.support.scripted import all_serving, pool_of, request, seen
from tests.support.tiny import build_tokenizer
from tests.trainer.helpers import random_batch

pytestmark = pytest.mark.starts

PATIENCE_S = 120.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Models of 24 MB with different weights: more than sockets buffer, many buckets of a megabyte."""
    return [_checkpoint(tmp_path_factory.mktemp("models") / f"v{seed}", seed) for seed in range(3)]


def _checkpoint(folder: Path, seed: int) -> Path:
    vocab_size = build_tokenizer(folder)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocab_size,
        hidden_size=320,
        intermediate_size=1280,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=80,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def vocabulary(checkpoint: Path) -> int:
    return int(json.loads((checkpoint / "config.json").read_text())["vocab_size"])


@asynccontextmanager
async def served(checkpoint: Path, count: int = 2) -> AsyncGenerator[list[WatchedServer]]:
    """Run embedded servers for the length of the block."""
    command = [sys.executable, "-m", "agentrl.servers.serve", "--exit-with-stdin", "--max-context-tokens", "512"]
    command += ["--device", "cpu", "--model-path", str(checkpoint)]
    opened = [await anyio.open_process(command, stderr=None) for _ in range(count)]
    try:
        servers: list[WatchedServer] = []
        for process in opened:
            assert process.stdout is not None
            with anyio.fail_after(300):
                line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 65_536)
            servers.append(WatchedServer(json.loads(line)["url"], process, vocabulary(checkpoint)))
        yield servers
    finally:
        for process in opened:
            with suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.aclose()


class WatchedControl(Control):
    """Control calls of which one bucket sets something off, before it is sent."""

    def __init__(self, transport: Transport, pid: int) -> None:
        super().__init__(transport, timeout_s=PATIENCE_S)
        self.pid = pid
        self.signal: signal.Signals | None = None
        """Sent to `pid` before the third bucket, once."""
        self.patience_s = PATIENCE_S
        """Deadline of each call from then on."""
        self.reached = anyio.Event()
        self._buckets = 0

    async def weights(self, path: str, body: object, what: str) -> None:
        if path == "/update_weights_from_distributed" and self.signal is not None:
            self._buckets += 1
            if self._buckets == 3:
                os.kill(self.pid, self.signal)
                self._buckets, self.signal, self.timeout_s = 0, None, self.patience_s
                self.reached.set()
        await super().weights(path, body, what)


class WatchedServer(SGLangServer):
    """The client of a server whose process the test knows."""

    def __init__(self, url: str, process: Process, vocab_size: int) -> None:
        super().__init__(url, vocab_size=vocab_size)
        self.process = process
        self._control = self.watched = WatchedControl(self._transport, process.pid)
        self.groups = GroupCalls(self.watched, lambda: self.info, flush=self._flush, has=self._has)

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def let_continue(self) -> None:
        """Continue the process after a SIGSTOP, with the deadlines of before."""
        self.watched.timeout_s = PATIENCE_S
        self.kill(signal.SIGCONT)


def published(checkpoint: Path, folder: Path) -> dict[str, str]:
    """Return the digests of a checkpoint as the disk path publishes it."""
    tensors = read_safetensors(checkpoint / "model.safetensors")
    return dict(publish(tensors, version=1, directory=folder, source=None).tensor_checksums)


def feed(version: int, trainer: LocalTrainer) -> WeightFeed:
    return WeightFeed(version=version, channel=trainer.channel)


async def test_with_requests_in_flight_servers_get_exactly_what_the_disk_path_would_give(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    trainer = LocalTrainer.of(checkpoints[1], bucket_mb=1)
    generations: list[Generation] = []
    async with served(checkpoints[0]) as servers, pool_of(*servers, health_interval_s=60) as pool:

        async def call(episode: str) -> None:
            generations.append(await pool.generate(request(episode=episode, max_new_tokens=400)))

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for index in range(4):
                    tasks.start_soon(call, str(index))
                await seen(pool, lambda status: status.in_flight == 4)
                report = await pool.update_weights(feed(1, trainer))
                assert report.num_bytes is not None
                assert report.num_bytes > 20 << 20
        for server in servers:
            assert await server.checksums() == published(checkpoints[1], tmp_path / "1")
        for generation in generations:
            assert [span.version for span in generation.spans] in ([0], [0, 1], [1])
            assert np.isfinite(generation.output_logprobs).all()
        trainer.weights = LocalTrainer.of(checkpoints[2]).weights
        await _a_cancelled_broadcast_leaves_trainer_and_servers_usable(pool, servers, trainer)
        for server in servers:
            assert await server.checksums() == published(checkpoints[2], tmp_path / "3")


async def _a_cancelled_broadcast_leaves_trainer_and_servers_usable(
    pool: ServerPool, servers: list[WatchedServer], trainer: LocalTrainer
) -> None:
    servers[1].watched.signal, servers[1].watched.patience_s = signal.SIGSTOP, 3
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.update_weights, feed(2, trainer))
            await servers[1].watched.reached.wait()
            tasks.cancel_scope.cancel()
        assert not trainer.sender.sending
        assert not servers[0].paused
        servers[1].let_continue()
        await pool.update_weights(feed(3, trainer))
        pool.report_started(servers[1].url)  # the pool asks it now instead of at the next health check
        await all_serving(pool)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_server_that_dies_or_stops_in_the_middle_is_left_out_and_the_others_go_on(
    checkpoints: list[Path], number: signal.Signals, tmp_path: Path
) -> None:
    trainer = LocalTrainer.of(checkpoints[1], bucket_mb=1)
    async with served(checkpoints[0]) as servers, pool_of(*servers, health_interval_s=60) as pool:
        lost = servers[1]
        lost.watched.signal, lost.watched.patience_s = number, 3
        with anyio.fail_after(PATIENCE_S):
            report = await pool.update_weights(feed(1, trainer))
            assert (report.updated, report.evicted) == ((servers[0].url,), (lost.url,))
            assert not trainer.sender.sending
            assert (await pool.generate(request(max_new_tokens=3))).spans[0].version == 1
            trainer.weights = LocalTrainer.of(checkpoints[2]).weights
            report = await pool.update_weights(feed(2, trainer))
            assert report.updated == (servers[0].url,)
            if number is signal.SIGSTOP:
                lost.let_continue()
                pool.report_started(lost.url)  # the pool asks it now instead of at the next health check
                await all_serving(pool)
                assert await lost.checksums() == published(checkpoints[2], tmp_path)
        assert await servers[0].checksums() == published(checkpoints[2], tmp_path)


async def test_a_server_that_waits_for_a_trainer_ends_when_told_to(checkpoints: list[Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        address = GroupAddress("silent", "127.0.0.1", silent.getsockname()[1], 2, "gloo")
        async with served(checkpoints[0], 1) as [server], server:
            server.watched.timeout_s = 3
            with anyio.fail_after(PATIENCE_S):  # it would wait for twice as long
                with pytest.raises(ServerTimeout, match=r"join the trainer's group"):
                    await server.groups.join(address)
                server.kill(signal.SIGTERM)
                await server.process.wait()


@asynccontextmanager
async def worker(checkpoint: Path, folder: Path, **settings: object) -> AsyncGenerator[RemoteTrainer]:
    async with launch_trainer(
        TrainerConfig.model_validate({"lr": 1e-3, **settings}),
        AlgorithmConfig(),
        model_path=checkpoint,
        total_steps=10,
        seed=0,
        log_path=folder / "trainer.log",
        sync=SyncConfig(bucket_mb=1, timeout_s=60),
    ) as trainer:
        yield trainer


async def test_a_worker_trains_sends_and_gives_the_same_weights_again(checkpoints: list[Path], tmp_path: Path) -> None:
    ids = np.arange(30, dtype=np.int32)
    async with (
        served(checkpoints[0]) as servers,
        worker(checkpoints[0], tmp_path) as trainer,
        pool_of(*servers, health_interval_s=10) as pool,
    ):
        with anyio.fail_after(PATIENCE_S):
            for version in (1, 2):
                await trainer.step(random_batch(version=max(1, version - 1)))
                [logprobs] = await trainer.logprobs([ids])
                probe = Probe(token_ids=ids, logprobs=logprobs, tolerance=LogprobTolerance(largest=1e-4))
                report = await pool.update_weights(WeightFeed(version=version, channel=trainer.channel), probe)
                assert report.evicted == ()
                written = await trainer.publish(version, str(tmp_path / "weights"))
                for server in servers:
                    assert await server.checksums() == written.tensor_checksums
            pool.report_dead(servers[0].url, "so it seems")
            await all_serving(pool)  # through a new group, with the weights the trainer still has
            await trainer.step(random_batch(version=2))
            pool.report_dead(servers[0].url, "so it seems")
            await all_serving(pool)  # from the snapshot: the trainer itself is past this version
            assert await servers[0].checksums() == written.tensor_checksums
            await pool.update_weights(WeightFeed(version=3, channel=trainer.channel))
            await all_serving(pool)
            assert await servers[0].checksums() != written.tensor_checksums
            await _a_server_that_returns_during_a_step_gets_the_present_version(pool, servers[0], trainer)


async def _a_server_that_returns_during_a_step_gets_the_present_version(
    pool: ServerPool, server: WatchedServer, trainer: RemoteTrainer
) -> None:
    stepped = anyio.Event()

    async def step() -> None:
        await trainer.step(random_batch(version=pool.policy_version, samples=20))
        stepped.set()

    before = await server.checksums()
    os.kill(trainer.pid, signal.SIGSTOP)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step)  # asked for before the server returns, and answered after
        await anyio.wait_all_tasks_blocked()
        pool.report_dead(server.url, "so it seems")
        os.kill(trainer.pid, signal.SIGCONT)
        await all_serving(pool)
    assert await server.checksums() == before
    assert (await pool.generate(request(max_new_tokens=3))).spans[0].version == pool.policy_version


@pytest.mark.long
@pytest.mark.parametrize("dp", [1, 2])
async def test_files_and_a_snapshot_of_any_number_of_ranks_bring_a_server_back_during_a_step(
    checkpoints: list[Path], tmp_path: Path, dp: int
) -> None:
    async with (
        served(checkpoints[0], 1) as [server],
        worker(checkpoints[0], tmp_path, parallel={"dp": dp}) as trainer,
        pool_of(server, health_interval_s=10) as pool,
    ):
        with anyio.fail_after(300):
            for version in (1, 2):
                await trainer.step(random_batch(version=version))
                written = await trainer.publish(version, str(tmp_path / "weights"))
                sent = WeightFeed(version=version, channel=trainer.channel)
                await pool.update_weights(written if version == 1 else sent)
                await _a_server_that_returns_during_a_step_gets_the_present_version(pool, server, trainer)
                assert await server.checksums() == written.tensor_checksums


async def test_a_step_runs_while_a_server_is_stalled_and_a_worker_that_dies_ends_the_update(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    async with (
        served(checkpoints[0]) as servers,
        worker(checkpoints[0], tmp_path) as trainer,
        pool_of(*servers, health_interval_s=60) as pool,
    ):
        servers[1].watched.signal = signal.SIGSTOP
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pool.update_weights, WeightFeed(version=1, channel=trainer.channel))
                await servers[1].watched.reached.wait()
                await trainer.step(random_batch(version=1))
                assert pool.policy_version == 0  # the update still waits for the server
                servers[1].let_continue()
            assert pool.policy_version == 1
            written = published(checkpoints[0], tmp_path / "as it was before the step")
            for server in servers:
                assert await server.checksums() == written

            servers[1].watched.pid, servers[1].watched.signal = trainer.pid, signal.SIGKILL
            with pytest.raises((TrainError, WeightSyncError)):
                await pool.update_weights(WeightFeed(version=2, channel=trainer.channel))
        assert not any(server.paused for server in servers)
        with pytest.raises(TrainError, match="cannot be used again"):
            await trainer.logprobs([np.arange(3, dtype=np.int32)])


async def test_without_a_snapshot_a_step_waits_until_the_weights_have_been_sent(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    async with worker(checkpoints[0], tmp_path, snapshot="stream") as trainer:
        stepped = anyio.Event()

        async def step() -> None:
            await trainer.step(random_batch(version=1))
            stepped.set()

        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                async with trainer.channel.sending(1, [], dtype="float32", again=False) as sending:
                    tasks.start_soon(step)
                    await anyio.wait_all_tasks_blocked()
                    assert not stepped.is_set()
                    assert sending.manifest.tensor_checksums.keys() == {
                        spec.name for bucket in sending.manifest.buckets for spec in bucket
                    }
                    assert await sending.finish(()) == {}
                await stepped.wait()
