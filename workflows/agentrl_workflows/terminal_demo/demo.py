"""The terminal demo: train a tiny transformer to read notes with `cat` and to follow them, in containers.

Run `make demo-terminal`, or `python -m agentrl_workflows.terminal_demo.demo`. It needs bubblewrap and Linux 6.6 or newer. A
warm start imitates a demonstrator that mostly runs some command without reading. The reward is what the tests of each task,
a Harbor folder, say of the files that the agent left. The command prints success on held-out tasks before and after, and
writes `curve.png` and `summary.json` to `runs/demo-terminal/`.

Invariant: every reward comes from a test that ran in a container; without containers the demo refuses to start.
"""

from __future__ import annotations

from agentrl.commands.running import run_command
from agentrl_workflows.demo.command import demo_app
from agentrl_workflows.terminal_demo.recipe import TERMINAL, TERMINAL_SMOKE

if __name__ == "__main__":
    about = "Train the terminal agent on this machine's CPU."
    run_command(demo_app(TERMINAL, TERMINAL_SMOKE, names=("demo-terminal", "smoke-terminal"), about=about))
