"""What `agentrl serve` cannot work with is refused by the option's name, before a model is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.servers.serve import ServeOptions, main
from agentrl_doors.commands.serve import serve_command


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_running_requests": 0}, "--max-running-requests: expected at least 1, got 0; leave it out for 64"),
        ({"max_context_tokens": 0}, "--max-context-tokens: expected at least 8, got 0; leave it out for 4096"),
        ({"threads": 0}, "--threads: expected 1 to 1024, got 0"),
        ({"threads": 10**12}, "--threads: expected 1 to 1024, got 1000000000000"),
        ({"port": 99999}, "--port: expected 0 to 65535, got 99999"),
        ({"port": -1}, "--port: expected 0 to 65535, got -1"),
        ({"random_seed": -1}, "--random-seed: expected at least 0, got -1"),
        ({"memory_fraction": float("nan")}, "--memory-fraction: expected over 0 and at most 1, got nan"),
        ({"memory_fraction": 1.5}, "--memory-fraction: expected over 0 and at most 1, got 1.5"),
        ({"device": "gpu"}, "--device: expected auto, cpu, cuda or cuda:N, got 'gpu'"),
    ],
)
def test_a_number_no_server_can_work_with_is_named(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        ServeOptions(model_path="model", **options)


def test_the_module_ends_with_status_two_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", "nowhere", "--max-running-requests", "0"]) == 2
    assert capsys.readouterr().err == "error: --max-running-requests: expected at least 1, got 0; leave it out for 64\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"port": 99999}, "--port: expected 0 to 65535"),
        ({"api_key_env": "NO_SUCH_KEY"}, "--api-key-env NO_SUCH_KEY: this environment variable is not set"),
        ({"host": "0.0.0.0"}, "host '0.0.0.0' can be reached from other machines"),
    ],
)
def test_the_command_refuses_it_before_the_model_is_loaded(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        serve_command(tmp_path, **changes)
