"""A pretrained model learns to use a tool on one GPU: trainer and embedded server share it.

Run: `python -m benchmarks.gpu_pretrained --model FILE.gguf` (needs a CUDA device; meant to end within ten minutes). It
evaluates SmolLM2-135M-Instruct on held-out word problems of one and two operations, trains it on others, in larger groups
and for more steps than `make demo-real`, evaluates again, and prints success, tokens a second and seconds of each part.
Results go to benchmarks/results/gpu_pretrained.json (`--results FILE`: another file).

A machine without a network needs this clone, its Python environment and the model: one file, or a folder of pieces that
`--split FILE.gguf FOLDER` makes, none larger than 40 MB. Without `--model` the file is that of `make demo-real`.
`--device cpu --smoke` runs the smallest form, which writes no results.

Invariant: the file has the digest of the published one, in however many pieces it came, unless `--any-model` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console

from agentrl.errors import ConfigError
from agentrl_workflows.demo.run import run_demo
from agentrl_workflows.pretrained_demo.model_file import check_digest, fetch_model_file
from agentrl_workflows.pretrained_demo.recipe import HARDER, REAL_SMOKE, PretrainedRecipe
from benchmarks.machine import describe_machine

RESULTS = Path(__file__).parent / "results" / "gpu_pretrained.json"
PIECE_BYTES = 40_000_000
ON_GPU = {
    "inference.device": "cuda",
    "inference.max_running_requests": 256,
    "rollout.max_concurrent_episodes": 256,
    "trainer.device": "cuda",
    "trainer.dtype": "bfloat16",
    "trainer.microbatch_tokens": 16_384,
    "sync": "disk",  # NCCL cannot join two processes that share a GPU
    "algorithm.group_size": 16,
    "algorithm.groups_per_step": 16,
    "engine.steps": 60,
    "tasks.factory_args.count": 4000,
    "tasks.eval.factory_args.count": 512,
}
"""What a GPU has room for: groups of 16 x 16 in place of 8 x 8, and 60 steps."""
SHOWN = ("sampled_before", "sampled_after", "greedy_before", "greedy_after")


def split(file: Path, folder: Path, *, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write a file as numbered pieces of at most `piece_bytes` and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces: list[Path] = []
    with file.open("rb") as source:
        while data := source.read(piece_bytes):
            pieces.append(folder / f"{file.name}.{len(pieces):03d}")
            pieces[-1].write_bytes(data)
    return pieces


def joined(place: Path, folder: Path) -> Path:
    """Return the model: `place` itself, or what the pieces in the folder `place` are, joined in `folder` by name.

    Raises:
        ConfigError: there is no such file, or the folder has no numbered pieces, or lacks one.
    """
    if place.is_file() or (place / "config.json").is_file():
        return place
    pieces = sorted(place.glob("*.gguf.[0-9][0-9][0-9]"))
    numbers = [int(piece.suffix[1:]) for piece in pieces]
    if not pieces or numbers != list(range(len(pieces))) or len({piece.stem for piece in pieces}) > 1:
        found = ", ".join(piece.name for piece in pieces) or "none"
        raise ConfigError(
            f"{place}: expected a GGUF file, or a folder with pieces NAME.gguf.000, .001, ... of one, got {found}"
        )
    whole = folder / pieces[0].stem
    if whole.exists() and whole.stat().st_size == sum(piece.stat().st_size for piece in pieces):
        return whole  # an import is found again by the place and time of its file
    folder.mkdir(parents=True, exist_ok=True)
    with whole.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, out)
    return whole


def recipe_for(device: str, *, smoke: bool, model: Path) -> PretrainedRecipe:
    """Return the variant of the demo that runs."""
    base = replace(REAL_SMOKE if smoke else HARDER, model=model, eval_servers=1)
    if device == "cpu":
        return base
    sizes = {} if smoke else {"eval_episodes": 512}
    given = {
        name: value for name, value in ON_GPU.items() if not smoke or "device" in name or "type" in name or "sync" in name
    }
    return replace(base, overrides={**base.overrides, **given}, **sizes)


def figures(run_dir: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run says of success and speed; rates are medians over the steps after the first."""
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    rated = steps[1:] or steps
    trained = [step for step in rated if step.get("trainer.seconds")]
    return {
        **{name: summary[name] for name in SHOWN},
        "success_by_step": [round(step["success_rate"], 4) for step in steps if "success_rate" in step],
        "steps": len(steps),
        "sampled_tokens_per_s": round(median(step["tokens_per_s"] for step in rated)),
        "trained_tokens_per_s": round(
            median(step["trainer.computed_tokens"] / step["trainer.seconds"] for step in trained) if trained else 0.0
        ),
        "max_logprob_difference": summary["max_logprob_difference"],
        "rl_seconds": round(summary["rl_seconds"], 1),
        "wall_seconds": round(summary["wall_seconds"], 1),
    }


def measure(given: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the demo on the chosen device and return its figures."""
    console = Console()
    model = joined(given.model, given.runs_dir / "models") if given.model else fetch_model_file(console)
    if not given.any_model and model.is_file():
        check_digest(model)
    recipe = recipe_for(given.device, smoke=given.smoke, model=model)
    outcome = run_demo(
        recipe,
        seed=given.seed,
        runs_dir=given.runs_dir,
        name=f"gpu-pretrained-{given.seed}",
        overrides=overrides,
        console=console,
    )
    return figures(outcome.run_dir, outcome.summary)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, help="the GGUF file, or a folder with its pieces")
    parser.add_argument(
        "--any-model", action="store_true", help="take a file with another digest, such as another chat model"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="the smallest form; writes no results")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures go; default: %(default)s")
    parser.add_argument("--split", nargs=2, type=Path, metavar=("FILE", "FOLDER"), help="only write FILE as pieces")
    given, overrides = parser.parse_known_args()
    if given.split:
        print(*split(*given.split), sep="\n")
        return
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu_pretrained needs a CUDA device; --device cpu --smoke runs its smallest form here")
        return
    try:
        row = measure(given, overrides)
    except ConfigError as error:
        raise SystemExit(f"agentrl: {error}") from error
    print(json.dumps(row), flush=True)
    if not given.smoke:
        machine = describe_machine("torch", "transformers")
        if given.device == "cuda":
            machine["gpu"] = torch.cuda.get_device_name()
        command = f"python -m benchmarks.gpu_pretrained --device {given.device} --seed {given.seed}"
        given.results.write_text(json.dumps({"machine": machine, "command": command, "run": row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
