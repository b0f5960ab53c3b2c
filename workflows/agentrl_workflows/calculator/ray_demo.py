"""The bundled demo on a Ray cluster of a head and two nodes on this machine, one of which is killed on the way.

Run `make demo-ray`, or `python -m agentrl_workflows.calculator.ray_demo`. The demo trains with two trainer processes and two
servers, which Ray places on the nodes. After a third of the steps this command kills the node of trainer rank 0. The run
then continues from its newest checkpoint on the nodes that are left.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from cyclopts import App
from rich.console import Console

from agentrl.commands.running import Overrides, run_command
from agentrl.errors import RunStopped
from agentrl_workflows.demo.ray_nodes import LocalRayCluster, ray_cluster

_STEP = re.compile(r"\bstep (\d+)/(\d+)")

app = App(name="demo-ray", help="Train the bundled calculator agent on a Ray cluster on this machine; a node is killed.")


@app.default
def main(
    *overrides: Overrides,
    seed: int = 0,
    smoke: bool = False,
    runs_dir: Path = Path("runs"),
    name: str = "demo-ray",
) -> None:
    """Run the demo.

    Args:
        overrides: Fields of the run file to override, such as --engine.steps 100.
        seed: Seed of weights, demonstrations, tasks and sampling.
        smoke: Run the smallest variant of the demo.
        runs_dir: Parent of the run directory.
        name: Name of the run directory, which is replaced.
    """
    tell("Starting a Ray cluster on this machine: a head and two nodes")
    with ray_cluster() as cluster:
        fields = {
            "cluster.launcher": "ray",
            "cluster.address": cluster.address,
            "trainer.parallel.dp": "2",
            "inference.servers": "2",
            "engine.checkpoint_every": "2" if smoke else "10",
        }
        flags = [word for field, value in fields.items() for word in (f"--{field}", value)]
        demo = [sys.executable, "-m", "agentrl_workflows.calculator.demo", "--seed", str(seed), "--name", name]
        demo += ["--runs-dir", str(runs_dir), *(["--smoke"] if smoke else []), *flags, *overrides]
        log = runs_dir / name / "logs" / "trainer.log"
        if code := follow(demo, cluster, log):
            raise RunStopped(f"the demo ended with exit code {code}")
    tell(f"The run went through the loss of a node; {log} names the nodes of its trainer")


def follow(demo: list[str], cluster: LocalRayCluster, log: Path) -> int:
    """Run the demo and return its exit code; kill the node of its trainer after a third of the steps."""
    killed = False
    with subprocess.Popen(demo, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            sys.stderr.flush()
            step = _STEP.search(line)
            if step is None or killed or 3 * int(step[1]) < int(step[2]):
                continue
            found = cluster.node_of(log)
            node = found or cluster.nodes[0]
            where = "on which trainer rank 0 runs" if node == found else "the first one"
            tell(f"Killing node {node[:8]}, {where}")
            cluster.kill_node(node)
            killed = True
    if not killed and not process.returncode:
        raise RunStopped("the demo ended before a third of its steps was reported, so no node was killed")
    return process.returncode


def tell(text: str) -> None:
    """Print a line about the cluster."""
    Console().print(f"cluster: {text}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    run_command(app)
