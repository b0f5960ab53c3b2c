"""How SGLang is launched: which Python, which device, which arguments, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.inference.config import InferenceConfig, flag_value, gpu_is_present, runs_on_cpu, tensor_parallel
from agentrl.inference.launch.sglang import CLONE, PYTHON_VARIABLE, find_sglang_python, sglang_recipe


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A working directory and an environment without SGLang."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def config(**given: object) -> InferenceConfig:
    return InferenceConfig.model_validate({"backend": "sglang", "device": "cpu", **given})


def command(config: InferenceConfig, model: Path, *, index: int = 0) -> tuple[str, ...]:
    return sglang_recipe(config, model, 5, index, 4000, model / "server.log").command


def model(folder: Path, positions: int | None = 1024) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    return folder / "model"


def test_the_python_is_the_one_named_then_the_environment_s_then_the_one_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, variable = executable(tmp_path / "named"), executable(tmp_path / "variable")
    beside = executable(tmp_path / ".sglang-venv" / "bin" / "python")
    assert find_sglang_python(config()) == str(beside)
    monkeypatch.setenv(PYTHON_VARIABLE, str(variable))
    assert find_sglang_python(config()) == str(variable)
    assert find_sglang_python(config(sglang_python=str(named))) == str(named)


def test_without_a_name_the_environment_in_the_root_of_the_clone_is_looked_for() -> None:
    assert (CLONE / "scripts" / "environments.py").is_file()


@pytest.mark.parametrize("through", ["config", "variable"])
def test_a_named_python_that_is_not_there_is_an_error_and_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    executable(tmp_path / ".sglang-venv" / "bin" / "python")
    if through == "variable":
        monkeypatch.setenv(PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(ConfigError, match="/nowhere/python is not an executable"):
        find_sglang_python(config(sglang_python="/nowhere/python" if through == "config" else None))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], False),
        (["dev/nvidiactl"], False),
        (["dev/nvidia0"], True),
        (["proc/driver/nvidia/gpus/0000:01:00.0"], True),
        (["dev/kfd"], True),
    ],
)
def test_a_gpu_is_seen_from_the_system_s_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], expected: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert gpu_is_present(tmp_path) is expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_is_present(tmp_path) is False


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"device": "cpu"}, True),
        ({"device": "cuda:1"}, False),
        ({"device": "cuda", "sglang_args": ["--device", "cpu"]}, True),
        ({"device": "cpu", "sglang_args": ["--device=cuda"]}, False),
    ],
)
def test_the_device_is_the_argument_s_then_the_field_s(given: dict[str, object], expected: bool) -> None:
    assert runs_on_cpu(config(**given)) is expected


def test_on_a_cpu_the_arguments_follow_from_the_config(tmp_path: Path) -> None:
    python = executable(tmp_path / "python")
    given = config(sglang_python=str(python), max_running_requests=16, max_context_tokens=512)
    recipe = sglang_recipe(given, model(tmp_path), 5, 2, 4000, tmp_path / "log")
    assert recipe.command[0] == str(python)
    assert recipe.command[1].endswith("sglang_main.py")
    expected = {
        "--device": "cpu",
        "--dtype": "float32",
        "--random-seed": "7",
        "--port": "4000",
        "--max-running-requests": "16",
        "--context-length": "520",
        "--max-total-tokens": str(16 * 520),
    }
    assert {flag: flag_value(recipe.command, flag) for flag in expected} == expected
    assert "--exit-with-stdin" in recipe.command
    assert "--base-gpu-id" not in recipe.command


def test_what_is_not_set_follows_the_model_and_a_cpu_s_defaults(tmp_path: Path) -> None:
    python = str(executable(tmp_path / "python"))
    recipe = sglang_recipe(config(sglang_python=python), model(tmp_path), 0, 0, 4000, tmp_path / "log")
    assert flag_value(recipe.command, "--context-length") == "1032"
    assert flag_value(recipe.command, "--max-running-requests") == "64"
    assert flag_value(recipe.command, "--max-total-tokens") == str(64 * 1032)
    assert recipe.environment["OMP_NUM_THREADS"] == "1"
    elsewhere = sglang_recipe(config(sglang_python=python), tmp_path / "missing", 0, 0, 4000, tmp_path / "log")
    assert flag_value(elsewhere.command, "--context-length") is None


def test_on_gpus_each_server_has_its_own_and_sglang_chooses_the_cache(tmp_path: Path) -> None:
    python = str(executable(tmp_path / "python"))
    given = config(sglang_python=python, device="cuda:2", dtype="bfloat16", sglang_args=["--tp", "2"])
    words = command(given, model(tmp_path), index=1)
    assert flag_value(words, "--base-gpu-id") == "4"
    assert flag_value(words, "--dtype") == "bfloat16"
    assert not {"--device", "--max-total-tokens", "--max-running-requests"} & set(words)


def test_explicit_arguments_win_over_derived_ones(tmp_path: Path) -> None:
    python = str(executable(tmp_path / "python"))
    given = config(sglang_python=python, max_context_tokens=512, sglang_args="--context-length 100 --max-total-tokens=7")
    words = command(given, model(tmp_path))
    assert words.count("--context-length") == 1
    assert flag_value(words, "--context-length") == "100"
    assert flag_value(words, "--max-total-tokens") == "7"


def test_the_key_is_named_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    words = command(config(sglang_python=str(executable(tmp_path / "python")), api_key_env="MY_KEY"), model(tmp_path))
    assert flag_value(words, "--api-key-env") == "MY_KEY"
    assert not [word for word in words if "s3cret" in word]


def test_an_ipv6_host_has_brackets_in_its_url(tmp_path: Path) -> None:
    given = config(sglang_python=str(executable(tmp_path / "python")), host="::1")
    recipe = sglang_recipe(given, model(tmp_path), 0, 0, 4000, tmp_path / "log")
    assert recipe.url == "http://[::1]:4000"
    assert flag_value(recipe.command, "--host") == "::1"


@pytest.mark.parametrize(
    ("argument", "mend"),
    [
        ("--api-key=x", "set inference.api_key_env"),
        ("--port=1", "agentrl picks free ports"),
        ("--host", "set inference.host"),
        ("--dtype", "set inference.dtype"),
        ("--model-path", "set model.path"),
        ("--log-level", "agentrl reads from SGLang's log"),
    ],
)
def test_arguments_that_agentrl_sets_are_refused_with_the_mend(argument: str, mend: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(mend)):
        config(sglang_args=[argument, "y"])


@pytest.mark.parametrize("size", ["two", "0", "-1"])
def test_a_tensor_parallel_size_that_is_no_number_is_a_config_error(size: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of GPUs"):
        tensor_parallel(config(sglang_args=[f"--tp={size}"]))
