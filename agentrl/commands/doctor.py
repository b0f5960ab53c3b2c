"""`agentrl doctor`: checks of the machine, the run file, its parts and its servers.

Invariant: each check prints one line, `ok`, or `FIX` with what to do. A check that builds on a failed one does not run.
The checks leave nothing behind, and write nothing into the run directory.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import anyio
from rich.console import Console
from rich.text import Text

from agentrl.commands.rollouts import num_workers
from agentrl.commands.running import Overrides, describe_error
from agentrl.commands.train import load_renderer
from agentrl.commands.trial import EPISODES, Trial, describe_trainer, describe_trial, play_trial, start_trainer
from agentrl.config import RunConfig, load_config
from agentrl.data.load import TaskSets, load_tasks
from agentrl.data.playable import playable_tasks
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.anywhere import with_device
from agentrl.inference.launch.pool import PortReserve, api_key
from agentrl.inference.launch.sglang import find_sglang_python, runs_on_cpu
from agentrl.inference.sglang.server import SGLangServer
from agentrl.inference.sglang.wire import check_sglang_version
from agentrl.plan.memory import gpus_per_server
from agentrl.plan.plan import plan_run
from agentrl.processes.base import TOKEN_VARIABLE
from agentrl.processes.config import ClusterConfig, listen_address
from agentrl.processes.handshake import checked_token, new_token
from agentrl.processes.machine import count_cores, is_loopback
from agentrl.processes.meeting import open_meeting
from agentrl.processes.ray import import_ray, open_ray
from agentrl.processes.watchdog.loop import run_watched
from agentrl.processes.watchdog.signals import interrupt_note
from agentrl.support.companions import companion_names, load_companion
from agentrl.support.foreign import visible
from agentrl.tokens.renderer import Renderer
from agentrl.workflow import RolloutWorkflow, load_workflow

_Result = TypeVar("_Result")
_PartCheck: TypeAlias = "Callable[[RolloutWorkflow], Callable[[], Awaitable[str]] | None]"
_MIN_DISK_MB = 1024
_ASK_S = 60.0
"""Seconds a Python may take to print its SGLang version."""


def doctor_command(config: Path | None = None, /, *overrides: Overrides) -> None:
    """Check this machine, a run file and its parts, play eight episodes, and print what to fix.

    Args:
        config: YAML file that describes a run; without it the command checks the machine only.
        overrides: Fields of the file to override.
    """
    with interrupt_note(lambda: "The checks leave nothing behind."):
        if not run_checks(config, overrides):
            sys.exit(1)


@dataclass(slots=True)
class CheckReport:
    """Prints each check and counts the failed ones."""

    console: Console = field(default_factory=Console)
    num_failed: int = 0

    def ok(self, name: str, detail: str) -> None:
        """Print a check that passed."""
        self._line("ok", "green", name, detail)

    def fix(self, name: str, detail: str) -> None:
        """Print a check that failed, and what to do."""
        self.num_failed += 1
        self._line("FIX", "red", name, detail)

    def check(self, name: str, probe: Callable[[], _Result], describe: Callable[[_Result], str]) -> _Result | None:
        """Run `probe` and print its result, or what to fix if it raises an error of agentrl; return None then."""
        try:
            result = probe()
        except (AgentRLError, BaseExceptionGroup) as error:
            self.fix(name, describe_error(error))
            return None
        self.ok(name, describe(result))
        return result

    def _line(self, mark: str, style: str, name: str, detail: str) -> None:
        self.console.print(Text.assemble((f"{mark:<4}", style), f"{name:<12} {visible(detail)}"), soft_wrap=True)


def run_checks(config: Path | None, overrides: Sequence[str] = (), console: Console | None = None) -> bool:
    """Check the machine and, with `config`, a run up to a few episodes; return whether everything is ok."""
    report = CheckReport(console=console or Console())
    _check_machine(report)
    if config is not None:
        run = report.check(
            "config", partial(load_config, config, overrides), lambda run: f"{config}: run {run.name!r} is valid"
        )
        if run is not None:
            check_cluster(report, run)
            _check_servers(report, run)
            _check_run_parts(report, run)
    else:
        _check_installed_sglang(report)
    report.console.print("Nothing to fix." if report.num_failed == 0 else f"{report.num_failed} to fix.")
    return report.num_failed == 0


def _check_machine(report: CheckReport) -> None:
    report.ok("python", f"{sys.version.split()[0]} at {sys.executable}")
    wrong = _wrong_packages()
    if wrong:
        report.fix("packages", f"{'; '.join(wrong)}: run pip install -e . again")
    else:
        report.ok("packages", "every dependency is installed in a version that agentrl accepts")
    cores = count_cores()
    report.ok("cpu", f"{cores} core(s)" + ("" if cores > 1 else "; trainer and servers share it"))
    free_mb = shutil.disk_usage(Path.cwd()).free // 2**20
    if free_mb < _MIN_DISK_MB:
        report.fix("disk", f"{free_mb} MB free in {Path.cwd()}; checkpoints need room: free at least {_MIN_DISK_MB} MB")
    else:
        report.ok("disk", f"{free_mb} MB free")
    report.ok("torch", _torch())


def _wrong_packages() -> list[str]:
    from packaging.requirements import Requirement

    wrong: list[str] = []
    for text in importlib.metadata.requires("agentrl") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(re.sub(r"\+.*", "", version), prereleases=True):
            wrong.append(f"{requirement.name} is {version}, expected {requirement.specifier}")
    return wrong


def _torch() -> str:
    import torch

    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return f"{torch.__version__}, CUDA: {names}"
    return f"{torch.__version__}, no CUDA device: training and serving run on the CPU"


def _check_installed_sglang(report: CheckReport) -> None:
    """Print the installed SGLang; only runs with that backend need one, so none is ok."""
    try:
        report.ok("sglang", _installed_sglang(InferenceConfig()))
    except ConfigError as error:
        report.ok("sglang", f"none: {error}")


def _installed_sglang(config: InferenceConfig) -> str:
    """Return version and Python of the SGLang that a run would launch."""
    python = find_sglang_python(config)
    command = [python, "-c", "import importlib.metadata as m; print(m.version('sglang'))"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} does not run: {error}; install SGLang again with make sglang-install") from error
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["(no output)"])[-1]
        raise ConfigError(
            f"{python} has no SGLang: {last}; run make sglang-install, or set inference.sglang_python to another one"
        )
    version = answer.stdout.strip()
    check_sglang_version(version, python)
    return f"{version} at {python}"


def _check_servers(report: CheckReport, run: RunConfig) -> None:
    """Check what the servers of a run need before they start, or ask running servers what they are."""
    if run.inference.urls:
        for url in run.inference.urls:
            report.check("server", partial(_ask, run, url), lambda found: found)
        return
    if run.inference.backend == "sglang":
        report.check("sglang", partial(_installed_sglang, run.inference), lambda found: found)
    report.check(
        "port", partial(_free_port, run.inference), lambda port: f"{run.inference.host} has free ports, such as {port}"
    )
    report.check(
        "key", partial(api_key, run.inference), lambda key: "set" if key else "none; the servers listen on loopback only"
    )


def _free_port(config: InferenceConfig) -> int:
    with PortReserve(config.host) as ports:
        return ports.take()


def _ask(run: RunConfig, url: str) -> str:
    return _run_with_watchdog(run, partial(_running_server, run, url))


async def _running_server(run: RunConfig, url: str) -> str:
    key, wait_s = api_key(run.inference), run.inference.control_timeout_s
    async with SGLangServer(url, vocab_size=1, api_key=key, control_timeout_s=wait_s) as server:
        return f"{url}: {server.info.engine} {server.info.version}, policy version {server.version}"


def _check_run_parts(report: CheckReport, run: RunConfig) -> None:
    tasks = report.check(
        "tasks",
        lambda: load_tasks(run.tasks),
        lambda sets: f"{sets.train.describe()} for training, {len(sets.evaluation)} held out",
    )
    workflow = report.check(
        "workflow", lambda: load_workflow(run.workflow, run.workflow_args), lambda found: f"{found.name} from {run.workflow}"
    )
    if workflow is not None:
        _check_companions(report, run, workflow)
    renderer = report.check(
        "model",
        lambda: load_renderer(run, run.model.directory),
        lambda found: f"{run.model.path}: vocabulary of {found.vocab_size}, chat template renders",
    )
    trial: Trial | None = None
    if tasks is not None and workflow is not None and renderer is not None:
        play = partial(_play_some, run, tasks, workflow, renderer)
        with report.console.status(f"playing {EPISODES} episodes"):
            trial = report.check("episodes", lambda: _run_with_watchdog(run, play), describe_trial)
    if renderer is not None and run.cluster.launcher != "local":
        report.ok("trainer", "not started: its ranks load the model on their own machines")
    elif renderer is not None:
        start = partial(start_trainer, run, trial)
        with report.console.status("starting the trainer"):
            report.check("trainer", lambda: _run_with_watchdog(run, start), partial(describe_trainer, run, trial=trial))


async def _play_some(run: RunConfig, tasks: TaskSets, workflow: RolloutWorkflow, renderer: Renderer) -> Trial:
    return await play_trial(run, playable_tasks(tasks, run.tasks, workflow.refusal), workflow, renderer)


def _check_companions(report: CheckReport, run: RunConfig, workflow: RolloutWorkflow) -> None:
    """Check what companions know of a workflow, such as its sandbox."""
    for name in companion_names("agentrl.doctor"):
        probe = cast("_PartCheck", load_companion("agentrl.doctor", name))
        if (check := probe(workflow)) is not None:
            report.check(name, partial(_run_with_watchdog, run, check), lambda found: found)


def _run_with_watchdog(run: RunConfig, job: Callable[[], Awaitable[_Result]]) -> _Result:
    note = "Its temporary files stay behind."
    return run_watched(job, stall_timeout_s=run.engine.stall_timeout_s, on_exit=lambda _ending: note)


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
    """Check that a Ray cluster has the GPUs and the cores that the processes of a resolved run reserve together."""
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
