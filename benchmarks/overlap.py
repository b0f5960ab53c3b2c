"""Asynchronous over synchronous steps where servers have hardware of their own, against what the simulator allows.

Run: `python -m benchmarks.overlap` (half an hour; `--quick` in two minutes). It prints a table and writes
benchmarks/results/overlap.json (`--output` names another file).

Engine, client, pool, journal and trainer worker are those of a run (`agentrl.commands.train.train_run`). The servers are in
another process, speak HTTP and take the time of a decode curve without computing (benchmarks/paced_servers.py): that of a
model of 7e9 parameters on one H100, as `agentrl simulate` derives it from the data sheet. Episodes of 4 turns sample
lognormal lengths with sigma 1, cut at 8 times the mean. Each setting runs with a staleness bound of 0 and of 2; everything
else is the same. Both runs do as many steps, and the first two do not count.

The bound is the same ratio in the simulator, with the curve, the lengths, and for each run the costs of trainer and updates
that were fitted to it, as the trainer is slower beside a driver that works more. `driver` is the share of a core that the
driver's process took in the asynchronous run: near 1 the driver is the bound, and the ratio says nothing about overlap. The
trainer worker computes on this machine's processor.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec

from agentrl.client import Client
from agentrl.commands.train import train_run
from agentrl.config import RunConfig, load_config
from agentrl.observe.progress import NoProgress
from agentrl.tokens.renderer import Renderer
from agentrl.types import Task
from agentrl.workflow import RolloutWorkflow
from agentrl_simulate.costs import AssumedUse, CostModel, HostCost, ModelSize, fleet_of_run, gpu_costs, shape_of_run
from agentrl_simulate.fitting import fit_run
from agentrl_simulate.outcome import SimulatedRun
from agentrl_simulate.plan.basis import measured_machines
from agentrl_simulate.play import play_run
from benchmarks.machine import describe_machine
from benchmarks.paced_servers import PacedSettings
from tests.support.tiny import build_tokenizer

TURNS, TOOL_S = 4, 0.05
SPREAD, CUT = 1.0, 8
"""Sigma of the lengths' logarithm, and the longest episode over the mean."""
WARM_UP = 2
SEVEN_BILLION = ModelSize(parameters=7_600_000_000, kv_bytes_per_token=57_344, attention_width=100_352)
"""Shape of Qwen2.5-7B."""
RESULTS = Path(__file__).parent / "results" / "overlap.json"


class Setting(NamedTuple):
    """One size of a run."""

    servers: int
    episodes: int
    """In flight, and in a batch."""
    mean_tokens: int
    steps: int


SETTINGS = (
    Setting(1, 64, 128, 10),
    Setting(2, 128, 128, 10),
    Setting(4, 256, 256, 8),
    Setting(8, 512, 512, 6),
    Setting(8, 1024, 256, 6),
)
QUICK = (Setting(1, 64, 64, 6),)


class Talk(RolloutWorkflow):
    """Says four things, and pays 0 or 1 by the parity of the answers' length."""

    async def run(self, task: Task, client: Client) -> float:
        """Play one episode."""
        messages: list[dict[str, object]] = []
        letters = 0
        for _ in range(TURNS):
            await anyio.sleep(TOOL_S)
            messages.append({"role": "user", "content": f"go on with {task.id}"})
            completion = await client.chat.completions.create(messages=messages)
            answer = completion.choices[0].message.content or ""
            letters += len(answer)
            messages.append({"role": "assistant", "content": answer})
        return float(letters % 2)


def tasks(count: int) -> list[Task]:
    """Return `count` tasks."""
    return [Task(id=str(number), data={}) for number in range(count)]


def save_model(folder: Path) -> PacedSettings:
    """Write a small model whose head is zero, which makes all tokens alike; return what servers must know."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = build_tokenizer(folder)
    renderer = Renderer.load(folder)
    end = renderer.end_of_turn_id
    assert end is not None
    config = Qwen3Config(
        vocab_size=size, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, max_position_embeddings=16_384, eos_token_id=end,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder)
    letters = sorted(renderer.encode_content(chr(ord("a") + number))[0] for number in range(16))
    assert letters[-1] - letters[0] == 15, letters
    return PacedSettings(
        servers=1, tokens_per_s=1.0, half_saturation=1.0, requests=None, context_weight=0.0, mean_tokens=1.0, spread=SPREAD,
        max_tokens=1, turns=TURNS, vocab_size=size, first_letter=letters[0], end_of_turn=end,
    )  # fmt: skip


def paced(base: PacedSettings, setting: Setting) -> PacedSettings:
    """Return what the servers of a setting are told."""
    curve = gpu_costs("h100", SEVEN_BILLION, AssumedUse(mean_tokens=2.0 * setting.mean_tokens)).server
    return msgspec.structs.replace(
        base,
        servers=setting.servers,
        tokens_per_s=curve.tokens_per_s,
        half_saturation=curve.half_saturation,
        requests=curve.requests,
        context_weight=curve.context_weight,
        mean_tokens=float(setting.mean_tokens),
        max_tokens=CUT * setting.mean_tokens,
    )


@contextmanager
def running_servers(settings: PacedSettings, busy: list[float]) -> Generator[list[str]]:
    """Yield the addresses of the servers; when they have ended, `busy` has the share of the time in which each had work."""
    command = [sys.executable, "-m", "benchmarks.paced_servers", msgspec.json.encode(settings).decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
            process.stdin.close()
            busy += json.loads(process.stdout.readline())
        finally:
            process.kill()


def run_file(folder: Path, setting: Setting, urls: list[str], staleness: int) -> RunConfig:
    """Return the run of a setting."""
    file = folder / "run.yaml"
    groups = setting.episodes // 8
    file.write_text(
        json.dumps(
            {
                "name": f"{setting.servers}x{setting.episodes}-{staleness}",
                "runs_dir": str(folder / "runs"),
                "workflow": "benchmarks.overlap:Talk",
                "tasks": {
                    "factory": "benchmarks.overlap:tasks",
                    "factory_args": {"count": groups * (setting.steps + 4)},
                    "shuffle": False,
                },
                "model": {"path": str(folder / "model")},
                "sampling": {"max_tokens": CUT * setting.mean_tokens},
                "inference": {"urls": urls, "max_context_tokens": 16_000, "dtype": "float32"},
                "rollout": {"max_concurrent_episodes": setting.episodes},
                "algorithm": {"max_staleness": staleness, "group_size": 8, "groups_per_step": groups},
                "trainer": {"lr": 1e-12, "device": "cpu", "threads": 1, "minibatches": 1},
                "engine": {"steps": setting.steps, "eval_every": 0, "stop_after_skipped": 0},
            }
        )
    )
    return load_config(file, [])


def measure(folder: Path, base: PacedSettings, setting: Setting, staleness: int) -> tuple[RunConfig, Mapping[str, float]]:
    """Do one run; return it with what was measured after the warm-up."""
    busy: list[float] = []
    with running_servers(paced(base, setting), busy) as urls:
        run = run_file(folder, setting, urls, staleness)
        cpu, began = time.process_time(), time.monotonic()
        anyio.run(partial(train_run, run, progress=NoProgress(), existing="replace"))
        driver = (time.process_time() - cpu) / (time.monotonic() - began)
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    later = steps[WARM_UP:]
    seconds = steps[-1]["wall_s"] - steps[WARM_UP - 1]["wall_s"]
    tokens = sum(line["loss_tokens"] for line in later)
    return run, {
        "step_s": seconds / len(later),
        "trainer_idle": sum(line["trainer_wait_s"] for line in later) / seconds,
        "train_s": sum(line["train_s"] for line in later) / len(later),
        "server_idle": 1 - sum(busy) / len(busy),
        "staleness": sum(line.get("staleness_mean", 0.0) * line["loss_tokens"] for line in later) / tokens,
        "driver": driver,
    }


def bound(base: PacedSettings, setting: Setting, runs: Mapping[int, RunConfig]) -> Mapping[str, float]:
    """Return the seconds of a step in the simulator, with both staleness bounds."""
    settings = paced(base, setting)
    source = settings.source(outside_s=TOOL_S, context_tokens=12)
    played: dict[int, SimulatedRun] = {}
    for staleness, run in runs.items():
        shape = shape_of_run(run)
        fitted = fit_run(run.run_dir, replace(measured_machines(run), shares_cores=False), shape).costs
        costs = CostModel(
            server=settings.cost, trainer=fitted.trainer, update=fitted.update, host=HostCost(), origin="curve and fit"
        )
        played[staleness] = play_run(shape, fleet_of_run(run), costs, source, warm_up=WARM_UP)
    return {"sync_step_s": played[0].step_s, "async_step_s": played[2].step_s, "ratio": played[0].step_s / played[2].step_s}


def compare(folder: Path, base: PacedSettings, setting: Setting) -> dict[str, Any]:
    """Return the figures of a setting."""
    runs: dict[int, RunConfig] = {}
    found: dict[int, Mapping[str, float]] = {}
    for staleness in (0, 2):
        runs[staleness], found[staleness] = measure(folder, base, setting, staleness)
    allowed = bound(base, setting, runs)
    ratio = found[0]["step_s"] / found[2]["step_s"]
    return {
        **setting._asdict(),
        "sync": found[0],
        "async": found[2],
        "simulated": allowed,
        "ratio": ratio,
        "share_of_bound": ratio / allowed["ratio"] if math.isfinite(allowed["ratio"]) else math.nan,
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small setting")
    parser.add_argument("--settings", type=int, nargs="+", help="numbers of the settings to run, from 0; default: all")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = QUICK if options.quick else tuple(SETTINGS[at] for at in options.settings or range(len(SETTINGS)))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = save_model(folder / "model")
        for setting in chosen:
            row = compare(folder, base, setting)
            rows.append(row)
            print(json.dumps(row), flush=True)
    report = {"machine": describe_machine("torch", "aiohttp"), "rows": rows}
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
