"""A process that serves a scripted policy until one step is trained: `python -m ... RUN_DIR [resume]`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

from agentrl.engine.parts import BEGUN_RUN
from tests.online.harness import online_run
from tests.rollout.harness import make_renderer


async def main(run_dir: Path, *, resumes: bool) -> None:
    """Print the address, and serve."""
    with TemporaryDirectory() as folder:
        renderer = make_renderer(Path(folder))
        async with online_run(run_dir, renderer, resume=BEGUN_RUN if resumes else None) as run:
            sys.stdout.write(f"{run.url}\n")
            sys.stdout.flush()
            await run.ended.wait()


if __name__ == "__main__":
    anyio.run(lambda: main(Path(sys.argv[1]), resumes=sys.argv[2:] == ["resume"]))
