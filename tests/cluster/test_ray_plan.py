"""What the plan of a run says about Ray; no Ray is needed."""

import pytest

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
