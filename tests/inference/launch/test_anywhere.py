"""Recipes of servers that start on any node."""

from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.anywhere import node_command, recipe_anywhere
from agentrl.inference.launch.sglang import LAUNCHER, sglang_recipe


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
