"""Make a Harbor folder from two commits: `python -m agentrl_workflows.terminal_commits REPO --before A --after B OUT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import anyio

from agentrl.errors import AgentRLError
from agentrl_workflows.terminal_commits.folder import TaskOptions, as_patterns
from agentrl_workflows.terminal_commits.make_task import made_line, make_task


def main() -> None:
    """Make the task that the command line describes."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl_workflows.terminal_commits",
        description="Make a task from a local git repository: the agent gets the first commit, and the tests of the second "
        "judge it. Tests that fail before and pass after have to be fixed. They run in the containers of training.",
    )
    parser.add_argument("repository", type=Path, help="a local git repository")
    parser.add_argument("out", type=Path, help="the folder of the task, which does not exist yet")
    parser.add_argument("--before", required=True, help="the commit that the agent gets")
    parser.add_argument("--after", required=True, help="the commit with the tests and the sources of the oracle")
    parser.add_argument("--runner", choices=("pytest", "unittest"), default="unittest", help="what runs the tests")
    parser.add_argument("--packages", type=Path, help="folder that `pip install --target` made, with pytest where it runs")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="PATTERN", help="paths of tests, instead of the usual ones"
    )
    parser.add_argument("--paths", nargs="+", default=["src", "."], help="folders of the project that Python imports from")
    parser.add_argument("--image", default="debian:12", help="the name that the task has for its image")
    parser.add_argument("--root", help="folder of the unpacked image; without it, this machine's programs")
    parser.add_argument("--instruction", type=Path, help="file with the instruction, instead of the commits' messages")
    parser.add_argument("--seconds", type=float, default=120.0, help="that the tests have")
    parser.add_argument("--feedback", action="store_true", help="offer the share of tests that pass after each turn")
    given = parser.parse_args()
    try:
        options = TaskOptions(
            runner=given.runner,
            packages=given.packages,
            tests=as_patterns(given.tests),
            paths=tuple(given.paths),
            image=given.image,
            instruction=given.instruction.read_text(encoding="utf-8") if given.instruction else None,
            seconds=given.seconds,
            feedback=given.feedback,
        )
        made = anyio.run(lambda: make_task(given.repository, given.before, given.after, given.out, options, root=given.root))
    except (AgentRLError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{made_line(made)}\n")


if __name__ == "__main__":
    main()
