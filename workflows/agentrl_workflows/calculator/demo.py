"""The bundled demo: train a tiny transformer to use a tool over several turns, on this machine's CPU.

Run `make demo`, or `python -m agentrl_workflows.calculator.demo`. It takes about four minutes on two idle cores and needs
no network. A warm start first imitates a demonstrator whose most likely first action is wrong: it guesses instead of
calling the tool. Reinforcement learning then has to reverse that preference, through the public path: workflow, client,
HTTP to the embedded server, weight updates while requests run. The success rate climbs step by step. At the end the
command prints a table and writes `curve.png` and `summary.json` to `runs/demo/`. Flags override fields of demo.yaml: with
`--inference.backend sglang` the same run uses a real SGLang server.

Invariant: the numbers in the table come from held-out tasks, which neither the demonstrations nor training contain.
"""

from __future__ import annotations

from agentrl.commands.running import run_command
from agentrl_workflows.calculator.recipe import FULL, SMOKE
from agentrl_workflows.demo.command import demo_app

if __name__ == "__main__":
    about = "Train the bundled calculator agent on this machine's CPU."
    run_command(demo_app(FULL, SMOKE, names=("demo", "smoke"), about=about))
