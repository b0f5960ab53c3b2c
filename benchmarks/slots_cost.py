"""What the slots of the loss cost a training step: this checkout beside another one of this repository, step by step.

    git worktree add ../base 6101e7f
    python -m benchmarks.slots_cost ../base

6101e7f is the last commit whose trainer called decoupled PPO by name. Each checkout runs in a process of its own with the
batches and models of `benchmarks.trainer`; the two take turns, step by step, so that a busy machine disturbs them alike.
A figure is a median of CPU time over the steps; the first steps are also compared: loss, gradient norm and weights, bit by
bit. The program prints a table and writes benchmarks/results/slots_cost.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import IO

from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "slots_cost.json"
TARGET = 0.97
COMPARED = 3
"""Steps whose results are compared."""


def answer(source: Path, folder: Path) -> None:
    """Serve the checkout in the working directory: a step for each line of standard input, a JSON line for each step."""
    import torch
    from transformers.utils import logging

    from agentrl.algo.config import AlgorithmConfig
    from agentrl.trainer.config import TrainerConfig
    from agentrl.trainer.model import PolicyModel
    from agentrl.trainer.policy import PolicyTrainer
    from benchmarks.trainer import LR, batch, cases, checkpoint

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for case in cases():
        path, data = checkpoint(case, folder), batch(case)
        config = TrainerConfig(lr=LR, minibatches=2)
        trainer = PolicyTrainer(PolicyModel(path, device=torch.device("cpu")), config, AlgorithmConfig(), total_steps=1000)
        _say({"case": case.name, "tokens": sum(case.lengths), "source": str(source)})
        for line in sys.stdin:
            if line == "next\n":
                break
            began = time.process_time()
            metrics = trainer.step(data).metrics
            seconds = time.process_time() - began
            digest = hashlib.sha256()
            for name, raw in sorted(trainer.model.export().items()):
                digest.update(name.encode() + bytes(raw.data))
            _say({"s": seconds, "seen": [metrics["loss"].hex(), metrics["grad_norm"].hex(), digest.hexdigest()]})
    _say({"case": None})


def _say(record: object) -> None:
    print(json.dumps(record), flush=True)


class Checkout:
    """A process that steps the trainer of one checkout."""

    def __init__(self, root: Path, folder: Path, stack: ExitStack) -> None:
        """Start it; the program is this file, whatever the checkout has."""
        folder.mkdir()
        command = [sys.executable, "-P", __file__, "--answer", str(root), "--folder", str(folder)]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        process = subprocess.Popen(
            command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        self._to: IO[str] = process.stdin
        self._back: IO[str] = process.stdout

    def read(self) -> dict[str, object]:
        line = self._back.readline()
        if not line:
            raise RuntimeError("a checkout ended; its message is above")
        return json.loads(line)

    def tell(self, word: str) -> None:
        self._to.write(f"{word}\n")
        self._to.flush()


def compare(base: Path, repeats: int) -> list[dict[str, object]]:
    """Return a row for each case: tokens per CPU-second of both, their ratio, and whether the steps are equal."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        here = Path(__file__).parents[1]
        checkouts = [Checkout(root, folder / str(at), stack) for at, root in enumerate((base.resolve(), here))]
        while (heads := [one.read() for one in checkouts])[0]["case"] is not None:
            seconds: list[list[float]] = [[], []]
            seen: list[list[object]] = [[], []]
            for number in range(repeats + 1):
                for at, one in enumerate(checkouts if number % 2 else checkouts[::-1]):
                    place = at if number % 2 else 1 - at
                    one.tell("step")
                    found = one.read()
                    if number:  # the first step allocates
                        seconds[place].append(float(str(found["s"])))
                    if number < COMPARED:
                        seen[place].append(found["seen"])
            for one in checkouts:
                one.tell("next")
            tokens = float(str(heads[0]["tokens"]))
            speeds = [tokens / median(each) for each in seconds]
            # Noise of the machine hits both of a turn alike, so the ratio of each turn is steadier than that of the medians.
            ratio = median(before / now for before, now in zip(*seconds, strict=True))
            rows.append(
                {
                    "case": heads[0]["case"],
                    "before_tokens_per_cpu_s": round(speeds[0]),
                    "now_tokens_per_cpu_s": round(speeds[1]),
                    "ratio": round(ratio, 3),
                    "equal_bits": seen[0] == seen[1],
                }
            )
            print(f"{rows[-1]}", flush=True)
    return rows


def main() -> None:
    """Compare, print and write; or serve one checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, nargs="?", help="a checkout of the commit to compare with")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer is not None:
        answer(arguments.answer, arguments.folder)
        return
    if arguments.base is None:
        parser.error("name a checkout of the commit to compare with")
    rows = compare(arguments.base, arguments.repeats)
    record = {"date": datetime.now(UTC).date().isoformat(), "machine": describe_machine(), "target": TARGET, "cases": rows}
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
