"""Tasks from the commits of real packages: which share makes a valid task, and why the others do not.

Run: `python -m benchmarks.terminal_commits --packages DIR REPOSITORY...`, where `pip install --target DIR 'pytest<8.4'` made
DIR and each REPOSITORY is a local one of a package whose tests need nothing else. It looks at the last 100 commits of the
main line, each with its first parent, as `python -m agentrl_workflows.terminal_commits` does; prints a line for each, and
writes counts to benchmarks/results/terminal_commits.json. Nothing of the repositories is written anywhere.

A task is valid where a test fails before and passes after in two runs, the oracle is paid and an agent that does nothing is
not. Commits that change no Python file of the sources, or no test, are counted without a run.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from agentrl.errors import AgentRLError
from agentrl_workflows.terminal_commits.folder import TaskOptions
from agentrl_workflows.terminal_commits.make_task import make_task
from agentrl_workflows.terminal_commits.suite import TESTS, fits
from benchmarks.machine import describe_machine

RESULT = Path(__file__).parent / "results" / "terminal_commits.json"
AT_ONCE = 2
VALID = "valid"
REASONS = {
    "its tests pass before the change, too": r"passes over the first one already",
    "no test passes after the change": r"no test passes over the second commit|no test file",
    "the tests write no outcomes": r"wrote no outcomes",
    "the oracle is not paid": r"the oracle earned|does not apply",
    "an agent that does nothing is paid": r"an agent that does nothing earned",
    "a submodule, a link out of it, or too large": r"submodule|links to|its files have",
}
"""Why two commits make no task, by the words of the error."""


class Change(NamedTuple):
    """A commit of the main line and the one before it."""

    before: str
    after: str


def git(repository: Path, *words: str) -> str:
    """Return what git says of a repository."""
    command = ["git", "-c", "safe.directory=*", "-C", str(repository), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def changes_of(repository: Path, count: int) -> list[Change]:
    """Return the last commits of the main line, each with its first parent."""
    listed = git(repository, "rev-list", "--first-parent", f"--max-count={count + 1}", "HEAD").split()
    return [Change(before, after) for after, before in pairwise(listed)]


def no_task(repository: Path, change: Change) -> str:
    """Return why a change can be no task by the names of its files alone; empty: it may be one."""
    paths = git(repository, "diff", "--name-only", change.before, change.after).splitlines()
    if not any(path.endswith(".py") and not fits(path, TESTS) for path in paths):
        return "it changes no Python file but tests"
    return "" if any(fits(path, TESTS) for path in paths) else "it changes no test"


async def outcome(repository: Path, change: Change, packages: Path) -> str:
    """Return `valid`, or why a change makes no task."""
    if why := no_task(repository, change):
        return why
    with tempfile.TemporaryDirectory() as place:
        options = TaskOptions(runner="pytest", packages=packages)
        try:
            await make_task(repository, change.before, change.after, Path(place) / "task", options)
        except (AgentRLError, OSError) as error:
            return next((name for name, words in REASONS.items() if re.search(words, str(error))), "another reason")
    return VALID


async def measure(repository: Path, count: int, packages: Path) -> dict[str, Any]:
    """Return the counts of one repository, and print a line for each of its commits."""
    found: Counter[str] = Counter()
    changes = changes_of(repository, count)
    limiter, began = anyio.CapacityLimiter(AT_ONCE), time.perf_counter()

    async def look(change: Change) -> None:
        async with limiter:
            said = await outcome(repository, change, packages)
        found[said] += 1
        print(f"  {found.total()}/{len(changes)} {change.after[:9]} {said}, {time.perf_counter() - began:.0f} s", flush=True)

    async with anyio.create_task_group() as tasks:
        for change in changes:
            tasks.start_soon(look, change)
    head = git(repository, "log", "-1", "--format=%h %cs").split()
    return {"head": head[0], "date": head[1], "commits": len(changes), **dict(found.most_common())}


def main() -> None:
    """Measure the repositories of the command line and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repositories", type=Path, nargs="*", metavar="REPOSITORY")
    parser.add_argument("--packages", type=Path, help="folder that `pip install --target` made, with pytest")
    parser.add_argument("--commits", type=int, default=100)
    options = parser.parse_args()
    if not options.repositories or options.packages is None:
        print("terminal_commits: name repositories, and --packages; nothing was done")
        return
    result: dict[str, Any] = {"machine": describe_machine("agentrl"), "repositories": {}}
    for repository in options.repositories:
        print(f"{repository.name}:", flush=True)
        counts = anyio.run(partial(measure, repository, options.commits, options.packages))
        result["repositories"][repository.name] = counts
        print(f"{repository.name}: {json.dumps(counts)}", flush=True)
        every = result["repositories"].values()
        result["commits"], result["valid"] = (sum(each.get(key, 0) for each in every) for key in ("commits", VALID))
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
        print(f"{result['valid']} of {result['commits']} commits make a valid task", flush=True)


if __name__ == "__main__":
    main()
