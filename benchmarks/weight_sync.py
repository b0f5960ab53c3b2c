"""Time of a weight update, through files and from memory to memory, beside the bandwidth of this machine.

Run: `python -m benchmarks.weight_sync` (about five minutes on two idle cores). `--quick` leaves the two large models out,
measures three times and writes nothing; `--sglang` measures against a real SGLang instead of the embedded server (which
`make sglang` installs) and writes to another file. It prints a table, and overwrites benchmarks/results/weight_sync.json
after each size, so that a run that is broken off leaves the sizes it has measured.

For each model size a trainer worker and one server run as in `agentrl train`; weights go to the server in turn by
`sync: disk` (safetensors in the page cache) and `sync: distributed` (gloo over loopback sockets, 64 MB buckets). Of each:

  publish   the trainer's log-probs of the probe and, for `disk`, digests and files: servers keep sampling
  update    for `distributed` first digests, while servers sample; pause, move, the servers' digests, continue, the probe
  pause     the part of it that servers stand still
  share     publish and update as a share of a step: they and training on 5760 tokens, the batch of `make demo`. Training
            is the median of `timed_steps` steps after one that is not counted: 3 or more, or 1 where a step takes longer
            than 30 s

and in the same run, for the same number of bytes, the floors:

  memcpy    one copy within this process
  loopback  through a plain socket into another process
  gloo      one broadcast into another process, nothing else
  digest    one digest of the bytes

The columns /memcpy, /loopback and /gloo are the update over each of these three: how many such floors it takes.

Medians; the two ways alternate, so that a busy machine disturbs them alike.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import anyio
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.config import EngineConfig
from agentrl.engine.publishing import WeightPublisher
from agentrl.engine.report import PublishReport
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.trainer.config import TrainerConfig
from agentrl.trainer.worker.client import RemoteTrainer, launch_trainer
from agentrl.weights.process_group import join, listen
from agentrl.weights.types import GroupAddress
from benchmarks.machine import describe_machine
from benchmarks.trainer import Case, batch
from tests.support.tiny import build_tokenizer

RESULTS = Path(__file__).parent / "results"
PATIENCE = timedelta(seconds=120)
STEP_LENGTHS = (90,) * 64
"""Tokens of the samples of a step: as many, and as long, as those of `make demo`."""
LONG_STEP_S = 30.0
"""Steps that take longer are timed once."""
FLOORS = ("memcpy", "loopback", "gloo")
"""What an update is compared with."""
Way = Literal["disk", "distributed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model's shape, how often to measure updates of it, and how many training steps to time."""

    name: str
    hidden: int
    layers: int
    repeats: int
    steps: int


SIZES = (
    Size(name="0.1M", hidden=64, layers=2, repeats=15, steps=5),
    Size(name="5M", hidden=256, layers=7, repeats=11, steps=3),
    Size(name="30M", hidden=512, layers=9, repeats=7, steps=3),
    Size(name="120M", hidden=1024, layers=9, repeats=5, steps=3),
)


def checkpoint(size: Size, folder: Path) -> Path:
    """Write a random model of the size and return its directory."""
    path = folder / size.name
    vocab_size = build_tokenizer(path)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=size.hidden, intermediate_size=3 * size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 32, num_key_value_heads=size.hidden // 32, head_dim=32, tie_word_embeddings=True,
        max_position_embeddings=4096, eos_token_id=0, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median wall-clock time of a call, after one that is not counted."""
    times: list[float] = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def read_socket(port: int, count: int, times: int) -> None:
    """Read `count` bytes `times` times and say so each time; the other process of the loopback floor."""
    into = memoryview(bytearray(count))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(times):
            got = 0
            while got < count:
                got += connection.recv_into(into[got:])
            connection.sendall(b"!")


def loopback(count: int, repeats: int) -> float:
    """Return the seconds `count` bytes take through a plain socket into another process."""
    data = memoryview(bytearray(count))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        reader = get_context("spawn").Process(target=read_socket, args=(port, count, repeats + 1), daemon=True)
        reader.start()
        with closing(server.accept()[0]) as connection:

            def send() -> None:
                connection.sendall(data)
                connection.recv(1)

            result = seconds(send, repeats)
        reader.join()
    return result


def receive_broadcasts(port: int, count: int, times: int) -> None:
    """Take part in `times` broadcasts; the other process of the gloo floor."""
    group = join(GroupAddress("floor", "127.0.0.1", port, 2, "gloo"), 1, PATIENCE)
    into = torch.zeros(count, dtype=torch.uint8)
    for _ in range(times):
        group.wait(group.broadcast([into]))
    group.wait(group.broadcast([torch.empty(1)]))


def gloo(count: int, repeats: int) -> float:
    """Return the seconds one broadcast of `count` bytes takes, sent in full; the last of many, so that all have arrived."""
    store = listen("127.0.0.1", PATIENCE)
    reader = get_context("spawn").Process(target=receive_broadcasts, args=(store.port, count, repeats + 1), daemon=True)
    reader.start()
    group = join(GroupAddress("floor", "127.0.0.1", store.port, 2, "gloo"), 0, PATIENCE)
    data = torch.zeros(count, dtype=torch.uint8)
    result = seconds(lambda: group.wait(group.broadcast([data])), repeats)
    group.wait(group.broadcast([torch.empty(1)]))
    reader.join()
    return result


def floors(count: int, repeats: int) -> dict[str, float]:
    """Return what moving `count` bytes takes at least."""
    source, target = torch.ones(count, dtype=torch.uint8), torch.zeros(count, dtype=torch.uint8)
    data = source.numpy().data
    return {
        "memcpy_s": seconds(lambda: target.copy_(source), repeats),
        "loopback_s": loopback(count, repeats),
        "gloo_s": gloo(count, repeats),
        "digest_s": seconds(lambda: hashlib.blake2b(data, digest_size=16).digest(), min(repeats, 3)),
    }


async def step_seconds(trainer: RemoteTrainer, size: Size, vocab: int) -> list[float]:
    """Return the times of some training steps, after one that is not counted; of one step where it takes long."""
    data = batch(Case(name=size.name, hidden=size.hidden, layers=size.layers, vocab=vocab, lengths=STEP_LENGTHS))

    async def step() -> float:
        begin = time.perf_counter()
        await trainer.step(data)
        return time.perf_counter() - begin

    first = await step()
    return [await step() for _ in range(size.steps if first <= LONG_STEP_S else 1)]


async def measure(size: Size, folder: Path, backend: Literal["embedded", "sglang"]) -> dict[str, Any]:
    """Return what the two ways cost for one size, and the floors."""
    path = checkpoint(size, folder)
    vocab = int(json.loads((path / "config.json").read_text())["vocab_size"])
    servers = InferenceConfig(
        backend=backend, device="cpu", dtype="float32", max_context_tokens=512, max_running_requests=8, control_timeout_s=120
    )
    reports: dict[Way, list[PublishReport]] = {"disk": [], "distributed": []}
    logs = folder / f"logs-{size.name}"
    async with (
        launch_trainer(
            TrainerConfig(device="cpu"),
            AlgorithmConfig(),
            model_path=path,
            total_steps=100,
            seed=0,
            log_path=logs / "trainer.log",
        ) as trainer,
        launch_pool(servers, model_path=path, vocab_size=vocab, log_dir=logs) as pool,
    ):
        steps = await step_seconds(trainer, size, vocab)
        publishers: dict[Way, WeightPublisher] = {
            way: WeightPublisher(
                trainer=trainer,
                inference=pool,
                run_dir=folder / f"run-{size.name}",
                config=EngineConfig(probe_tolerance=1e-2),
                probe_ids=range(10, 90),
                send_dtype="float32" if way == "distributed" else None,
            )
            for way in reports
        }
        version = 0
        for _ in range(size.repeats + 1):
            for way, publisher in publishers.items():
                version += 1
                reports[way].append(await publisher.send(await publisher.hold(version), beside=False))
    count = reports["distributed"][0].num_bytes
    step_s, floor = median(steps), floors(count, size.repeats)
    rows: dict[str, Any] = {way: summary(some[1:], count, step_s, floor) for way, some in reports.items()}
    return {
        "parameters": trainer.num_parameters,
        "bytes": count,
        "step_tokens": sum(STEP_LENGTHS),
        "step_s": round(step_s, 5),
        "timed_steps": len(steps),
        **rows,
        "floors": {name: round(value, 6) for name, value in floor.items()},
        "disk_over_distributed": round(rows["disk"]["total_s"] / rows["distributed"]["total_s"], 2),
    }


def summary(reports: list[PublishReport], count: int, step_s: float, floor: dict[str, float]) -> dict[str, float]:
    """Return the medians of some updates, and what they are of a step and of the floors."""
    publish_s = median(report.publish_s for report in reports)
    update_s = median(report.update_s for report in reports)
    pause_s = median(report.pause_s for report in reports)
    total_s = median(report.publish_s + report.update_s for report in reports)
    return {
        "publish_s": round(publish_s, 5),
        "update_s": round(update_s, 5),
        "pause_s": round(pause_s, 5),
        "total_s": round(total_s, 5),
        "gb_per_s": round(count / total_s / 1e9, 3),
        "share": round(total_s / (total_s + step_s), 4),
        **{f"update_over_{name}": round(update_s / floor[f"{name}_s"], 2) for name in FLOORS},
        "pause_over_gloo": round(pause_s / floor["gloo_s"], 2),
    }


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a table, times in milliseconds."""
    heads = "".join(f"{'/' + name:>10}" for name in FLOORS)
    print(f"{'model':<7}{'MB':>7}{'way':>13}{'publish':>9}{'update':>9}{'pause':>9}{'GB/s':>7}{'share':>8}{heads}")
    for name, row in results.items():
        for way in ("disk", "distributed"):
            some = row[way]
            times = "".join(f"{some[key] * 1e3:>9.1f}" for key in ("publish_s", "update_s", "pause_s"))
            ratios = "".join(f"{some[f'update_over_{floor}']:>10.1f}" for floor in FLOORS)
            print(
                f"{name:<7}{row['bytes'] / 1e6:>7.1f}{way:>13}{times}{some['gb_per_s']:>7.2f}{some['share']:>8.1%}{ratios}"
            )
    print(f"{'floors':<14}{'memcpy':>13}{'loopback':>9}{'gloo':>9}{'digest':>9}{'step':>9}{'timed':>7}")
    for name, row in results.items():
        memcpy, *others = (value * 1e3 for value in (*row["floors"].values(), row["step_s"]))
        print(f"{name:<14}{memcpy:>13.3f}{''.join(f'{value:>9.1f}' for value in others)}{row['timed_steps']:>7}")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sglang", action="store_true")
    parser.add_argument("--sizes", nargs="+", choices=[size.name for size in SIZES], default=[size.name for size in SIZES])
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    backend: Literal["embedded", "sglang"] = "sglang" if arguments.sglang else "embedded"
    sizes = SIZES[:2] if arguments.quick else tuple(size for size in SIZES if size.name in arguments.sizes)
    about = {"machine": describe_machine("torch", "agentrl", sglang=arguments.sglang), "server": backend}
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            if arguments.quick:
                size = Size(name=size.name, hidden=size.hidden, layers=size.layers, repeats=3, steps=3)
            results[size.name] = anyio.run(measure, size, Path(folder), backend)
            sys.stderr.write(f"{size.name} done\n")
            if not arguments.quick:
                name = "weight_sync_sglang.json" if arguments.sglang else "weight_sync.json"
                (RESULTS / name).write_text(json.dumps({**about, "sizes": results}, indent=2) + "\n")
    show(results)


if __name__ == "__main__":
    main()
