"""What `agentrl doctor` checks of the cluster that a run names: launcher, token, address, shared directory.

Invariant: nothing that it opens stays open, and nothing that it writes stays behind.
"""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import anyio

from agentrl.cli.check.report import CheckReport
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.inference.gpus import runs_on_cpu
from agentrl.inference.launch.anywhere import with_device
from agentrl.jobs.rollouts import num_workers
from agentrl.plan.memory import gpus_per_server
from agentrl.plan.plan import plan_run
from agentrl.processes.base import TOKEN_VARIABLE
from agentrl.processes.config import ClusterConfig, listen_address
from agentrl.processes.handshake import checked_token, new_token
from agentrl.processes.machine import is_loopback
from agentrl.processes.meeting import open_meeting
from agentrl.processes.ray import import_ray, open_ray


def check_cluster(report: CheckReport, run: RunConfig) -> None:
    """Check what the launcher of `run` needs; `local` needs nothing."""
    config = run.cluster
    if config.launcher == "local":
        return
    if config.launcher == "attach":
        report.check("token", partial(_own_token, config), lambda found: found)
    else:
        report.check("ray", lambda: anyio.run(_ray_nodes, run), lambda found: found)
    report.check("listen", lambda: anyio.run(_listening, config), lambda found: found)
    report.check("run folder", partial(_writable_folder, run), lambda found: found)


def _own_token(_config: ClusterConfig) -> str:
    checked_token(os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE)
    return f"{TOKEN_VARIABLE} is set"


async def _listening(config: ClusterConfig) -> str:
    """Listen where trainer ranks would join."""
    host, _ = listen_address(config)
    async with open_meeting(listen_address(config), 1, new_token()) as meeting:
        port = meeting.address[1]
        only = "; only ranks on this machine reach it: set cluster.listen for others" if is_loopback(host) else ""
        return f"trainer ranks can join at {host}:{port}{only}"


async def _ray_nodes(run: RunConfig) -> str:
    """Connect to the Ray cluster, count what it has, and check that it is enough for the run."""
    async with open_ray(run.cluster):
        ray = import_ray()
        resources: dict[str, float] = ray.cluster_resources()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        gpus, cpus = resources.get("GPU", 0), resources.get("CPU", 0)
        check_room(plan_run(run).run, gpus, cpus)
        return f"version {ray.__version__}, {len(nodes)} node(s), {gpus:g} GPU(s), {cpus:g} core(s)"


def check_room(run: RunConfig, gpus: float, cpus: float) -> None:
    """Check that a Ray cluster has the GPUs and the cores that the processes of a resolved run reserve together.

    Raises:
        ConfigError: it has fewer.
    """
    inference, ranks = with_device(run.inference, has_gpus=gpus > 0), run.trainer.parallel.shape.world
    servers = 0 if inference.urls else inference.servers
    workers = num_workers(run.rollout) if run.rollout.runner == "ray" else 0
    trains_on_gpus = run.trainer.device.startswith("cuda") or (run.trainer.device == "auto" and gpus > 0)
    serves_on_gpus = inference.device.startswith("cuda")
    if inference.backend == "sglang":
        serves_on_gpus = not runs_on_cpu(inference)
    asked_gpus = ranks * trains_on_gpus + servers * gpus_per_server(run.inference) * serves_on_gpus
    asked_cpus = ranks + servers + workers
    if asked_gpus > gpus or asked_cpus > cpus:
        raise ConfigError(
            f"the run reserves {asked_gpus} GPU(s) and {asked_cpus} core(s), for {ranks} trainer rank(s), {servers} "
            f"server(s) and {workers} rollout worker(s), and the Ray cluster has {gpus:g} GPU(s) and {cpus:g} core(s) in "
            "all; add nodes, or lower trainer.parallel, inference.servers or rollout.workers"
        )


def _writable_folder(run: RunConfig) -> str:
    """Write a file where the run directory will be, and remove it."""
    folder = Path(run.runs_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"agentrl doctor")
    except OSError as error:
        raise ConfigError(f"runs_dir: cannot write to {existing}: {error.strerror}; choose another one") from error
    return f"{folder} can be written here; every machine of the cluster must see it under this path"
