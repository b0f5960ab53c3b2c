"""Write the bundled terminal tasks: `python -m agentrl_workflows.terminal_tasks DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from agentrl_workflows.terminal_tasks.catalog import bundled_problems
from agentrl_workflows.terminal_tasks.problem import write_problems

if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("usage: python -m agentrl_workflows.terminal_tasks DIR, where DIR does not exist yet")
    written = write_problems(bundled_problems(), Path(sys.argv[1]))
    sys.stdout.write(f"{len(written)} tasks are in {sys.argv[1]}/\n")
