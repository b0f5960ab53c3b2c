"""The manifests and the script for schedulers say what the ranks read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.processes.base import TOKEN_VARIABLE
from agentrl.processes.config import LISTEN_PORT
from agentrl.processes.joining import RankNumbers, numbers_in
from agentrl.trainer.worker.ranks import WORKER_MODULE
from tests.support.cli import write_run
from tests.support.leftovers import processes_with

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def container(job: dict[str, Any]) -> dict[str, Any]:
    [found] = job["spec"]["template"]["spec"]["containers"]
    return found


def variables(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in pod["env"]}


def test_the_jobs_of_kubernetes_meet_at_the_service_with_one_secret() -> None:
    service, driver, trainer = manifests("kubernetes.yaml")
    assert [part["kind"] for part in (service, driver, trainer)] == ["Service", "Job", "Job"]
    assert service["spec"]["selector"] == driver["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["port"] == LISTEN_PORT
    command = container(trainer)["command"]
    assert command == ["python", "-m", WORKER_MODULE, "--attach", f"{service['metadata']['name']}:{LISTEN_PORT}"]
    flags = container(driver)["args"]
    assert "--cluster.launcher=attach" in flags
    assert f"--cluster.listen=0.0.0.0:{LISTEN_PORT}" in flags
    secrets = [variables(container(job))[TOKEN_VARIABLE]["valueFrom"] for job in (driver, trainer)]
    assert secrets[0] == secrets[1] == {"secretKeyRef": {"name": "agentrl", "key": "token"}}


def test_an_indexed_job_has_as_many_ranks_as_the_trainer_and_starts_failed_ones_again() -> None:
    _, driver, trainer = manifests("kubernetes.yaml")
    spec = trainer["spec"]
    world = int(variables(container(trainer))["WORLD_SIZE"]["value"])
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == world
    assert f"--trainer.parallel.dp={world}" in container(driver)["args"]
    assert spec["template"]["spec"]["restartPolicy"] == "OnFailure"
    last = {"JOB_COMPLETION_INDEX": str(world - 1), "WORLD_SIZE": str(world)}
    assert numbers_in(last) == RankNumbers(world - 1, world, 0)


def test_the_cluster_of_kuberay_shares_one_volume() -> None:
    [cluster] = manifests("kuberay.yaml")
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    [workers] = cluster["spec"]["workerGroupSpecs"]
    pods = [group["template"]["spec"] for group in (cluster["spec"]["headGroupSpec"], workers)]
    claims = [pod["volumes"][0]["persistentVolumeClaim"]["claimName"] for pod in pods]
    assert claims == ["agentrl", "agentrl"]
    assert pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


@pytest.mark.starts
def test_the_script_for_slurm_is_a_script_that_starts_ranks_and_driver() -> None:
    script = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    text = script.read_text()
    assert f"python -m {WORKER_MODULE} --attach $driver:$port" in text
    assert f"port={LISTEN_PORT}" in text
    assert f"export {TOKEN_VARIABLE}" in text
    assert "--cluster.launcher attach" in text


@pytest.mark.starts
def test_a_driver_that_starts_again_continues_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    _, driver, _ = manifests("kubernetes.yaml")
    command = [*container(driver)["command"], "echo", "train"]

    def last_line() -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()[-1]

    assert last_line() == "train --replace"
    (tmp_path / "runs" / "cluster" / "checkpoints" / "step-000002").mkdir(parents=True)
    assert last_line() == "train --resume"


SRUN = """#!/bin/bash
# One task for each number below SLURM_NTASKS, as Slurm starts them.
while [[ $1 == --* ]]; do shift; done
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" > "trainer-$task.log" 2>&1 &
done
wait
"""


@pytest.mark.starts
@pytest.mark.long
def test_the_script_for_slurm_trains_with_the_ranks_that_srun_starts(tmp_path: Path, checkpoint: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("hostname", "#!/bin/bash\necho 127.0.0.1\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    run = write_run(tmp_path, checkpoint)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        ["bash", str(FOLDER / "slurm.sh"), str(run)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "SLURM_NTASKS": "2"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "small: finished, 2 of 2 steps" in result.stderr + result.stdout
    assert processes_with(f"--attach 127.0.0.1:{LISTEN_PORT}") == []
