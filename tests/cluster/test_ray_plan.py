"""What the plan of a run says about Ray; no Ray is needed."""

import pytest

from agentrl.cli.check.cluster import check_room
from agentrl.config import RunConfig, parse_config
from agentrl.errors import ConfigError
from agentrl.jobs.plan.gpus import missing_gpus
from agentrl.jobs.plan.mesh import with_mesh
from agentrl.jobs.plan.plan import describe_plan


def run_with(*flags: str) -> RunConfig:
    values = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}, "cluster": {"launcher": "ray"}}
    return parse_config(values, flags)


def test_the_plan_names_the_cluster_and_who_chose_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert "Ray at 10.0.0.9:6379 ($RAY_ADDRESS)" in describe_plan(run_with())
    assert "Ray at 10.0.0.1:6379 (cluster.address)" in describe_plan(run_with("--cluster.address=10.0.0.1:6379"))
    monkeypatch.delenv("RAY_ADDRESS")
    assert "a Ray cluster that starts on this machine for the run" in describe_plan(run_with())


def test_weights_go_from_memory_unless_a_shared_folder_is_named():
    assert run_with().route.method == "distributed"
    assert run_with("--engine.publish_dir=/shared/weights").route.method == "disk"


def test_gpus_are_those_of_the_cluster():
    assert missing_gpus(run_with("--trainer.device=cuda", "--inference.device=cuda:7")) == []
    with pytest.raises(ConfigError, match=r"trainer\.parallel\.dp: auto counts the GPUs of one machine"):
        with_mesh(run_with("--trainer.parallel.dp=auto"))


def test_doctor_names_what_a_cluster_lacks_for_the_run():
    flags = ["--trainer.device=cuda", "--trainer.parallel.dp=4", "--inference.device=cuda", "--inference.backend=sglang"]
    run = run_with(*flags, "--inference.sglang_args=--tp-size 2", "--rollout.runner=ray", "--rollout.workers=3")
    check_room(run, gpus=6, cpus=8)
    check_room(run_with("--trainer.device=cpu", "--inference.device=cpu"), gpus=0, cpus=2)
    for gpus, cpus in ((5, 8), (6, 7)):
        with pytest.raises(
            ConfigError, match=rf"reserves 6 GPU\(s\) and 8 core\(s\), .* has {gpus} GPU\(s\) and {cpus} core"
        ):
            check_room(run, gpus, cpus)
