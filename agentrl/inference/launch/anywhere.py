"""Recipes of servers that a launcher may start on any node, and `python -m` this: SGLang with the Python of its node.

Invariant: such a recipe has nothing of the driver's machine but the run file and the servers' key. The node fills in its
address, a free port and the Python of its SGLang; its GPUs count from 0: a launcher shows a server only its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from agentrl.errors import ConfigError
from agentrl.inference.config import InferenceConfig, flag_value
from agentrl.inference.launch.process import Recipe
from agentrl.inference.launch.sglang import LAUNCHER, find_sglang_python
from agentrl.processes.base import HOST_WORD, PORT_WORD
from agentrl.processes.machine import is_loopback

RecipeBuilder: TypeAlias = Callable[[InferenceConfig, Path, int, int, int | str, Path], Recipe]
"""Builds the recipe from config, model, seed, number of the server, port and log."""


def with_device(config: InferenceConfig, *, has_gpus: bool) -> InferenceConfig:
    """Return `config` with the device that `auto` means for SGLang servers of a cluster: its GPUs, if it has any.

    Example:
        >>> sglang = InferenceConfig(backend="sglang")
        >>> with_device(sglang, has_gpus=True).device, with_device(sglang, has_gpus=False).device
        ('cuda', 'cpu')
    """
    if config.backend != "sglang" or config.device != "auto":
        return config
    return config.model_copy(update={"device": "cuda" if has_gpus else "cpu"})


def recipe_anywhere(build: RecipeBuilder, config: InferenceConfig, model_path: Path, seed: int, log_path: Path) -> Recipe:
    """Return the recipe of a server for any node."""
    # The recipe's Python is replaced below; this one exists, so that the driver needs no SGLang.
    here = {"host": HOST_WORD, "device": config.device.partition(":")[0], "sglang_python": sys.executable}
    recipe = build(config.model_copy(update=here), model_path.absolute(), seed, 0, PORT_WORD, log_path)
    name = config.api_key_env
    if name is not None and name in os.environ:
        recipe = replace(recipe, environment={**recipe.environment, name: os.environ[name]})
    if config.backend == "sglang":
        _python, _launcher, *arguments = recipe.command
        return replace(recipe, command=(sys.executable, "-m", __name__, config.sglang_python or "", *arguments))
    return replace(recipe, gpus=1 if config.device.startswith("cuda") else 0)


def node_command(sglang_python: str, arguments: list[str]) -> list[str]:
    """Return the command that starts SGLang on this node."""
    host = flag_value(arguments, "--host") or ""
    if not is_loopback(host) and flag_value(arguments, "--api-key-env") is None:
        raise ConfigError(
            f"inference.api_key_env: a server on {host} can be reached by others; name a variable that holds a key"
        )
    return [find_sglang_python(InferenceConfig(sglang_python=sglang_python or None)), str(LAUNCHER), *arguments]


def main() -> None:
    """Become SGLang: `python -m agentrl.inference.launch.anywhere PYTHON_OR_NOTHING ARGUMENTS...`."""
    try:
        command = node_command(sys.argv[1], sys.argv[2:])
    except ConfigError as error:
        sys.exit(f"error: {error}")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
