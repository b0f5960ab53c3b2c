"""What the plan of a run says about Ray; all but the tests marked `ray` need none."""

from pathlib import Path

import pytest

from agentrl.commands.doctor import check_room
from agentrl.config import RunConfig, parse_config
from agentrl.errors import ConfigError
from agentrl.plan.places import missing_gpus
from agentrl.plan.plan import plan_run
from agentrl.plan.text import describe_plan
from agentrl.processes.config import ClusterConfig
from agentrl.processes.machine import count_cores
from agentrl.processes.ray import ray_resources
from agentrl_workflows.demo.ray_nodes import HEAD_CPUS, NODE_CPUS, LocalRayCluster


def run_with(*flags: str) -> RunConfig:
    values = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}, "cluster": {"launcher": "ray"}}
    return parse_config(values, flags)


def test_the_plan_names_the_cluster_and_who_chose_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert "Ray at 10.0.0.9:6379 ($RAY_ADDRESS)" in describe_plan(plan_run(run_with()))
    assert "Ray at 10.0.0.1:6379 (cluster.address)" in describe_plan(plan_run(run_with("--cluster.address=10.0.0.1:6379")))
    monkeypatch.delenv("RAY_ADDRESS")
    assert "a Ray cluster that starts on this machine for the run" in describe_plan(plan_run(run_with()))


def test_weights_go_from_memory_unless_a_shared_folder_is_named():
    assert run_with().route.method == "distributed"
    assert run_with("--engine.publish_dir=/shared/weights").route.method == "disk"


def test_gpus_are_those_of_the_cluster():
    assert missing_gpus(run_with("--trainer.device=cuda", "--inference.device=cuda:7")) == []


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 8),
        (["--trainer.parallel.tp=2"], 4),
        (["--inference.backend=sglang", "--inference.device=cuda", "--inference.servers=2"], 6),
        (["--inference.backend=sglang", "--inference.device=cuda", "--inference.sglang_args=[--tp, '4']"], 4),
        (["--inference.backend=sglang", "--inference.servers=2"], 6),
        (["--inference.device=cuda", "--inference.servers=3"], 5),
    ],
)
def test_dp_auto_takes_the_gpus_of_the_cluster_that_servers_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], expected: int
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    plan = plan_run(run_with("--trainer.parallel.dp=auto", *flags), tmp_path)
    assert plan.run.trainer.parallel.dp == expected
    assert f"places {plan.run.trainer.parallel.shape.world} trainer rank(s)" in describe_plan(plan)


def test_dp_auto_takes_cores_where_the_cluster_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cores, auto = count_cores(), "--trainer.parallel.dp=auto"
    run = run_with(auto, "--inference.urls=[http://127.0.0.1:30000]", "--inference.backend=sglang")
    assert plan_run(run, tmp_path).run.trainer.parallel.dp == cores
    with pytest.raises(ConfigError, match=rf"the Ray cluster has {cores} core\(s\), of which {cores} server\(s\) and 0 "):
        plan_run(run_with(auto, f"--inference.servers={cores}"), tmp_path)


@pytest.mark.ray
def test_a_cluster_is_asked_what_it_has(cluster: LocalRayCluster):
    config = ClusterConfig(launcher="ray", address=cluster.address)
    cpus, gpus = ray_resources(config)
    assert cpus in [HEAD_CPUS + nodes * NODE_CPUS for nodes in range(2, 9)]  # other tests remove nodes and add some
    assert gpus == 0
    run = run_with("--trainer.parallel.dp=auto", f"--cluster.address={cluster.address}", "--inference.servers=2")
    assert plan_run(run).run.trainer.parallel.dp == cpus - 2


def test_doctor_names_what_a_cluster_lacks_for_the_run():
    flags = ["--trainer.device=cuda", "--trainer.parallel.dp=4", "--inference.device=cuda", "--inference.backend=sglang"]
    run = run_with(*flags, "--inference.sglang_args=--tp-size 2", "--rollout.runner=ray", "--rollout.workers=3")
    check_room(run, gpus=6, cpus=8)
    check_room(run_with("--trainer.device=cpu", "--inference.device=cpu"), gpus=0, cpus=2)
    check_room(run_with("--trainer.device=cpu", "--inference.backend=sglang"), gpus=0, cpus=2)
    on_its_own = run_with("--trainer.parallel.dp=4", "--inference.device=cuda")  # `auto` takes a GPU where there is one
    check_room(on_its_own, gpus=5, cpus=5)
    with pytest.raises(ConfigError, match=r"reserves 5 GPU\(s\)"):
        check_room(on_its_own, gpus=4, cpus=5)
    for gpus, cpus in ((5, 8), (6, 7)):
        with pytest.raises(
            ConfigError, match=rf"reserves 6 GPU\(s\) and 8 core\(s\), .* has {gpus} GPU\(s\) and {cpus} core"
        ):
            check_room(run, gpus, cpus)
