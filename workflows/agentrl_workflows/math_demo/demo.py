"""The math demo: a tiny transformer learns word problems with feedback, on this machine's CPU.

Run `make demo-math`, or `python -m agentrl_workflows.math_demo.demo`. It needs no network. A warm start first imitates a
demonstrator who mostly leaves out the last change of a problem, and who mostly insists on a wrong answer. Reinforcement
learning of `agentrl_workflows.math_feedback` has to reverse both habits: use both changes, and, after a wrong answer,
give another one that is likely. The table shows the success within one, two and three attempts, before and after;
`curve.png` and `summary.json` go to `runs/demo-math/`. Flags override fields of demo.yaml.

Invariant: the numbers in the table come from held-out sums, which neither the demonstrations nor training contain.
"""

from __future__ import annotations

from agentrl.commands.running import run_command
from agentrl_workflows.demo.command import demo_app
from agentrl_workflows.math_demo.recipe import MATH, MATH_SMOKE

if __name__ == "__main__":
    about = "Train a tiny model on word problems with feedback, on this machine's CPU."
    run_command(demo_app(MATH, MATH_SMOKE, names=("demo-math", "smoke-math"), about=about))
