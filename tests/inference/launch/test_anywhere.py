"""Recipes of servers that start on any node."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, LaunchError, ServerUnavailable
from agentrl.inference.config import InferenceConfig, flag_value
from agentrl.inference.launch.anywhere import node_command, recipe_anywhere
from agentrl.inference.launch.pool import launch_pool
from agentrl.inference.launch.sglang import LAUNCHER, sglang_recipe
from agentrl.processes.base import Child, ProcessSpec


def test_a_node_fills_in_its_address_port_and_python(tmp_path: Path):
    config = InferenceConfig(backend="sglang", device="cuda:3", sglang_args=("--tp", "2"), sglang_python="/on/the/node")
    recipe = recipe_anywhere(sglang_recipe, config, tmp_path, 7, tmp_path / "log")
    words = recipe.command
    assert words[1:4] == ("-m", "agentrl.inference.launch.anywhere", "/on/the/node")
    assert words[words.index("--host") + 1 : words.index("--host") + 4] == ("{host}", "--port", "{port}")
    assert words[words.index("--base-gpu-id") + 1] == "0"
    assert words[words.index("--random-seed") + 1] == "7"
    assert recipe.url == "http://{host}:{port}"
    assert recipe.gpus == 2


def test_the_key_goes_along_in_the_environment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "secret")
    config = InferenceConfig(backend="sglang", device="cpu", api_key_env="MY_KEY")
    recipe = recipe_anywhere(sglang_recipe, config, tmp_path, 0, tmp_path / "log")
    assert recipe.environment["MY_KEY"] == "secret"
    assert "secret" not in " ".join(recipe.command)


class NodesElsewhere:
    """A cluster whose nodes refuse every process, and that keeps what it was asked for."""

    elsewhere = True

    def __init__(self, *, has_gpus: bool) -> None:
        self.has_gpus = has_gpus
        self.asked: list[ProcessSpec] = []

    async def reserves_gpus(self) -> bool:
        return self.has_gpus

    async def start(self, specs: Sequence[ProcessSpec]) -> Sequence[Child]:
        self.asked.extend(specs)
        raise LaunchError("no node takes it")


@pytest.mark.parametrize("has_gpus", [True, False])
async def test_the_device_auto_means_the_gpus_of_the_cluster_and_not_of_this_machine(tmp_path: Path, has_gpus: bool):
    launcher = NodesElsewhere(has_gpus=has_gpus)
    config = InferenceConfig(backend="sglang", sglang_args=("--tp", "2"))
    with pytest.raises(ServerUnavailable, match="no node takes it"):
        async with launch_pool(config, model_path=tmp_path, vocab_size=8, log_dir=tmp_path, launcher=launcher):
            pass
    [spec] = launcher.asked
    assert spec.gpus == (2 if has_gpus else 0)
    assert (flag_value(spec.command, "--device") == "cpu") is not has_gpus


def test_a_server_that_others_can_reach_needs_a_key(tmp_path: Path):
    python = tmp_path / "python"
    python.touch(mode=0o755)
    arguments = ["--host", "10.0.0.4", "--port", "1"]
    with pytest.raises(ConfigError, match=r"inference\.api_key_env: a server on 10\.0\.0\.4"):
        node_command(str(python), arguments)
    guarded = [*arguments, "--api-key-env", "KEY"]
    assert node_command(str(python), guarded) == [str(python), str(LAUNCHER), *guarded]
    assert node_command(str(python), ["--host", "127.0.0.1"])[:2] == [str(python), str(LAUNCHER)]


def test_a_node_without_sglang_names_the_places_where_it_looked():
    with pytest.raises(ConfigError, match=r"inference\.sglang_python: /missing is not an executable"):
        node_command("/missing", ["--host", "127.0.0.1"])
