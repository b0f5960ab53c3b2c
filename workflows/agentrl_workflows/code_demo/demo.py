"""The code demo: train a tiny transformer to write and correct functions, which run in the sandbox against hidden tests.

Run `make demo-code`, or `python -m agentrl_workflows.code_demo.demo`. It takes about six minutes on two idle cores and needs
bubblewrap. A warm start imitates a demonstrator that mostly ignores what it reads: the description, and what the failed
example says. The reward is that the hidden tests pass, less for each further attempt. Descriptions leave gaps, which
only the feedback on the first and on the second attempt can fill. The command prints success with at most one, two
and three attempts, and writes `curve.png` and `summary.json` to `runs/demo-code/`.

Invariant: every reward comes from executing the program; without a sandbox the demo refuses to start. The numbers in the
table come from held-out tasks.
"""

from __future__ import annotations

from agentrl.commands.running import run_command
from agentrl_workflows.code_demo.recipe import CODE, CODE_SMOKE
from agentrl_workflows.demo.command import demo_app

if __name__ == "__main__":
    about = "Train the bundled code agent on this machine's CPU."
    run_command(demo_app(CODE, CODE_SMOKE, names=("demo-code", "smoke-code"), about=about))
