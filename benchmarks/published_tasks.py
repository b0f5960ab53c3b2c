"""Task folders of Harbor that other people published: how many load, with an engine and without, and what their tests pay.

Run: `python -m benchmarks.published_tasks FOLDER [--play 40] [--image DIR]`. Each directory of FOLDER is a set, best named
after its origin and commit; the folders of its tasks are found at any depth, and nothing of them is written anywhere. It
prints a line as each set and each dozen of tasks is done, and writes counts to benchmarks/results/published_tasks.json.

A folder is well-formed unless Harbor or Docker could not use it either: its task.toml is no TOML or has values of wrong
types, a file that it has to have is missing (instruction, tests, Dockerfile or image), its Dockerfile has a line that is no
instruction, or copies a file that is not there. Those with compose files are counted apart.

  engine     could be built by Docker or podman: all that is read, and Dockerfiles that only the reading below refuses
  packages   loads without an engine where the image has what network commands fetch (`has_packages: ["*"]`)
  alone      loads without an engine and without such an image

With `--play N`, N folders with a solution and N without one are drawn from those that load, and played as `agentrl validate`
does: the oracle, which is to be paid in full, and an agent that does nothing, which must not be. Their containers have the
programs of this machine, or those of `--image`, the folder of an image; the results hold the last play of either.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec

from agentrl.commands.validate import Finding, FindingKind, TaskValidation
from agentrl.config import parse_config
from agentrl.errors import ConfigError, RunStopped
from agentrl.types import Task
from agentrl_sandbox.harbor.task import HARBOR_FILE, read_harbor_folder
from agentrl_sandbox.harbor.unreadable import reason_of
from agentrl_workflows.terminal import TerminalAgent
from agentrl_workflows.terminal.oracle import has_solution
from benchmarks.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "published_tasks.json"
AT_ONCE = 2
CHUNK = 12
COMPOSE = "environments of several containers are not started"
MALFORMED = {
    "task.toml cannot be read": r"^task\.toml: (?!Object contains unknown field)",
    "no instruction": r"instruction\.md: .*No such file",
    "no tests": r"expected tests/test\.sh",
    "no Dockerfile and no image": r"no Dockerfile",
    "a line of the Dockerfile is no instruction": r"this is no instruction that the sandbox knows|expected FROM",
    "COPY of a file that is not there": r"COPY: .* (?:is no file of|is left out by)",
}
"""What Harbor or Docker refuses as well, by the words of the reason."""
REFUSED = {
    "a field that Harbor's format does not have": r"Object contains unknown field",
    "variables of the user's machine": r"asks for a variable of this machine",
    "another user than root": r"one user",
    "stages of other images": r"several stages",
    "health checks, GPUs, tools and the like": r"^(?:environment|verifier|agent|steps)\.",
    "network commands": r"needs a network",
}
SAID = {
    "a RUN of its Dockerfile fails": r"Dockerfile:\d+: RUN",
    "the container has no program": r"([\w.+-]+): (?:command )?not found|(?:exec|env): [‘']?([\w./+-]+)[’']?: No such file",
    "the container has no Python module": r"No module named '?([\w.]+)|cannot import name '(\w+)'",
    "needs a network": r"needs a network|Temporary failure in name resolution|Could not resolve|Failed to establish",
    "reaches the deadline of the benchmark": r"timeout|deadline",
    "reaches its own limit of time or memory": r"was interrupted after|reached limits|limit:|limit\b",
    "a file that it expects is missing": r"No such file or directory|FileNotFoundError",
}
"""Why a task could not be judged, or its oracle was not paid, by what it said."""


class Folder(NamedTuple):
    """A task folder and what is known of it."""

    path: Path
    kind: str
    """`loads`, `refused`, `malformed` or `compose`."""
    why: str = ""
    engine: bool = False
    packages: bool = False
    alone: bool = False
    is_solved: bool = False
    """Whether it has a solution."""


def classify(path: Path) -> Folder:
    """Return what becomes of a task folder."""
    try:
        task = read_harbor_folder(path)
    except ConfigError as error:
        reason = reason_of(error, path)
        if COMPOSE in reason:
            return Folder(path, "compose")
        for why, words in MALFORMED.items():
            if re.search(words, reason):
                return Folder(path, "malformed", why)
        engine = "/Dockerfile: " in reason
        return Folder(path, "refused", named(REFUSED, reason)[0], engine=engine)
    dockerfile = path / "environment" / "Dockerfile"
    if task.image.image is None and not dockerfile.is_file():
        return Folder(path, "malformed", "no Dockerfile and no image")
    played = Task(id=path.name, data={"folder": str(path)})
    packages = TerminalAgent(has_packages=["*"]).refusal(played)
    alone = TerminalAgent().refusal(played)
    found = Folder(path, "loads", engine=True, packages=not packages, alone=not alone, is_solved=has_solution(task))
    return found._replace(kind="refused", why=named(REFUSED, packages)[0]) if packages else found


def named(reasons: dict[str, str], text: str) -> tuple[str, str]:
    """Return the name of the first reason whose words are in a text, and what a group of them found."""
    for name, words in reasons.items():
        if match := re.search(words, text):
            return name, next((group for group in match.groups() if group), "")
    return "another reason", ""


def counts_of(folders: Sequence[Folder]) -> dict[str, Any]:
    """Return the counts of folders, and the reasons of those that do not load."""
    well = [folder for folder in folders if folder.kind in ("loads", "refused")]
    return {
        "folders": len(folders),
        "compose": sum(folder.kind == "compose" for folder in folders),
        "malformed": dict(Counter(folder.why for folder in folders if folder.kind == "malformed").most_common()),
        "well_formed": len(well),
        "engine": sum(folder.engine for folder in well),
        "packages": sum(folder.packages for folder in well),
        "alone": sum(folder.alone for folder in well),
        "with_solution": sum(folder.is_solved for folder in well),
        "refused": dict(Counter(folder.why for folder in well if folder.kind == "refused").most_common()),
    }


def tasks_of(folders: Sequence[str]) -> list[Task]:
    """Return the tasks of folders, for the run files of this benchmark."""
    return [read_harbor_folder(Path(folder)).as_task(folder) for folder in folders]


async def play(folders: Sequence[Folder], options: argparse.Namespace) -> list[Finding]:
    """Return what a validation finds in a few folders."""
    given = {"images": {"*": options.image}, "has_packages": ["*"]}
    if options.containers != "bubblewrap":  # an engine builds the images by itself
        given = {"containers": {"backend": options.containers}}
    arguments = {"max_open": AT_ONCE, **given}
    run = parse_config(
        {
            "workflow": "agentrl_workflows.terminal:TerminalAgent",
            "workflow_args": {**arguments, "limits": {"memory_mb": 2048, "work_mb": 1024}},
            "tasks": {
                "factory": f"{__spec__.name}:tasks_of",
                "factory_args": {"folders": [str(each.path) for each in folders]},
            },
            "model": {"path": "none"},
            "rollout": {"max_concurrent_episodes": AT_ONCE, "episode_timeout_s": options.deadline_s, "episode_retries": 0},
        }
    )
    return (await TaskValidation(run).check()).findings


def outcome(folder: Folder, findings: Sequence[Finding]) -> dict[str, str]:
    """Return what became of the oracle and of the empty agent."""
    own = [each for each in findings if each.where == f"train task {folder.path}"]
    oracle = "paid" if folder.is_solved else "none"
    empty = "not paid"
    for each in own:
        why, what = named(SAID, each.detail)
        said = f"{why}: {what}" if what else why
        if each.kind is FindingKind.EMPTY:
            empty = "PAID"
        elif each.kind is FindingKind.REFERENCE:
            oracle = f"not paid: {said}"
        elif each.kind is FindingKind.FAILED and each.detail.startswith("with the reference"):
            oracle = f"fault: {said}"
        elif each.kind is FindingKind.FAILED:
            empty = f"fault: {said}"
    return {"folder": str(folder.path), "oracle": oracle, "empty": empty}


async def play_all(folders: Sequence[Folder], options: argparse.Namespace) -> list[dict[str, str]]:
    """Play folders by the dozen and print each outcome."""
    outcomes: list[dict[str, str]] = []
    for start in range(0, len(folders), CHUNK):
        some, began = folders[start : start + CHUNK], time.perf_counter()
        try:
            findings = await play(some, options)
        except (ConfigError, RunStopped) as error:
            sys.exit(f"{error}")
        for folder in some:
            outcomes.append(outcome(folder, findings))
            print(f"  {folder.path.name}: oracle {outcomes[-1]['oracle']}; empty agent {outcomes[-1]['empty']}", flush=True)
        if options.details is not None:
            with options.details.open("ab") as file:
                file.write(b"".join(msgspec.json.encode([each.kind, each.where, each.detail]) + b"\n" for each in findings))
        print(f"played {start + len(some)} of {len(folders)}, {time.perf_counter() - began:.0f} s", flush=True)
    return outcomes


def summary(outcomes: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the outcomes with their counts, and the folders whose empty agent was paid."""
    return {
        "played": len(outcomes),
        "oracle": dict(Counter(each["oracle"] for each in outcomes if each["oracle"] != "none").most_common()),
        "empty": dict(Counter(each["empty"] for each in outcomes).most_common()),
        "empty_paid": [Path(each["folder"]).name for each in outcomes if each["empty"] == "PAID"],
    }


def drawn(folders: Sequence[Folder], is_solved: bool, options: argparse.Namespace) -> list[Folder]:
    """Return folders that load, drawn by chance: the same ones for the same seed."""
    loads = [folder for folder in folders if (folder.packages if options.containers == "bubblewrap" else folder.engine)]
    known = [folder for folder in loads if folder.is_solved is is_solved]
    return random.Random(options.seed).sample(known, min(options.play, len(known)))


def main() -> None:
    """Classify the folders, play some of them, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="whose directories are sets of task folders")
    parser.add_argument("--containers", choices=["bubblewrap", "docker", "podman"], default="bubblewrap")
    parser.add_argument("--image", help="folder of the image of all tasks; by default the programs of this machine")
    parser.add_argument("--play", type=int, default=0, help="folders with a solution, and folders without, that are played")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=120.0, help="seconds of one episode, its tests included")
    parser.add_argument("--details", type=Path, help="file for what is found, in the words of the tasks; for no repository")
    options = parser.parse_args()
    if options.folder is None:
        print("published_tasks: name a folder whose directories are sets of task folders; nothing was done")
        return
    sets: dict[str, list[Folder]] = {}
    for place in sorted(each for each in options.folder.iterdir() if each.is_dir()):
        began = time.perf_counter()
        sets[place.name] = [classify(file.parent) for file in sorted(place.rglob(HARBOR_FILE))]
        counts = counts_of(sets[place.name])
        print(f"{place.name}: {json.dumps(counts)}, {time.perf_counter() - began:.0f} s", flush=True)
    every = [folder for folders in sets.values() for folder in folders]
    result: dict[str, Any] = {
        "machine": describe_machine("agentrl"),
        "sets": {name: counts_of(folders) for name, folders in sets.items()},
        "all": counts_of(every),
    }
    print(f"all: {json.dumps(result['all'])}", flush=True)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result |= {name: value for name, value in known.items() if name.startswith("played_over_")}
    if options.play:
        title = "machine" if options.image is None else "image"
        title = title if options.containers == "bubblewrap" else options.containers
        result[f"played_over_{title}"] = {
            "containers": options.containers,
            "seed": options.seed,
            "deadline_s": options.deadline_s,
            **{
                name: summary(anyio.run(play_all, drawn(every, is_solved, options), options))
                for name, is_solved in (("with_solution", True), ("without_solution", False))
            },
        }
        print(f"over the {title}: {json.dumps(result[f'played_over_{title}'])}", flush=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
