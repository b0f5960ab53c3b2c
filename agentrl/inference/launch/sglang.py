"""The Python, the device and the arguments with which agentrl launches an SGLang server.

Invariant: the server gets every setting of the config, or the launch is refused with the name of the setting;
`inference.sglang_args` override the other fields. Nothing here imports torch: files of the system show the GPUs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.inference.config import (
    CPU_RUNNING_REQUESTS,
    CPU_THREADS,
    EMBEDDED_CONTEXT_TOKENS,
    InferenceConfig,
    first_gpu,
    flag_value,
    runs_on_cpu,
    tensor_parallel,
)
from agentrl.inference.launch.process import Recipe

PYTHON_VARIABLE = "AGENTRL_SGLANG_PYTHON"
"""Environment variable that names the Python of SGLang's environment."""
LAUNCHER = Path(__file__).with_name("sglang_main.py")
CLONE = Path(__file__).parents[3]
"""Root of agentrl's clone, where `make sglang-install` puts SGLang's environment."""
_READY = (re.compile(r"The server is fired up and ready to roll"), re.compile(r"Uvicorn running on"))


def find_sglang_python(config: InferenceConfig) -> str:
    """Return the Python to launch SGLang with, from the first of the places that names one."""
    installed = [folder / ".sglang-venv" / "bin" / "python" for folder in (Path.cwd(), CLONE)]
    for source, named in (
        ("inference.sglang_python", config.sglang_python),
        (f"${PYTHON_VARIABLE}", os.environ.get(PYTHON_VARIABLE)),
    ):
        if named:
            if (found := shutil.which(named)) is None:
                raise ConfigError(f"{source}: {named} is not an executable; expected the Python of SGLang's environment")
            return found
    for path in installed:
        if os.access(path, os.X_OK):
            return str(path)  # not resolved: the Python of an environment is a link, which selects the environment
    places = ", ".join(["inference.sglang_python", f"${PYTHON_VARIABLE}", *dict.fromkeys(str(path) for path in installed)])
    raise ConfigError(
        f"no Python with SGLang to launch servers with; looked at {places}. Run `make sglang-install` in agentrl's clone, "
        "name one, or set inference.urls to servers that already run"
    )


def sglang_recipe(
    config: InferenceConfig, model_path: Path, seed: int, index: int, port: int | str, log_path: Path
) -> Recipe:
    """Return the recipe of SGLang server number `index` of a config."""
    python = find_sglang_python(config)
    extra_arguments = config.sglang_args
    on_cpu = runs_on_cpu(config)
    flags: dict[str, object] = {
        "--model-path": model_path,
        "--host": config.host,
        "--port": port,
        "--random-seed": seed + index,
        "--dtype": config.dtype or "float32",
    }
    environment: dict[str, str] = {}
    context = config.max_context_tokens or _positions(model_path)
    if context is not None:
        flags["--context-length"] = context + CONTEXT_HEADROOM
        # The headroom may exceed the model's positions; no request does, because the client ends it at `context`.
        environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    running = config.max_running_requests or (CPU_RUNNING_REQUESTS if on_cpu else None)
    if running is not None:
        flags["--max-running-requests"] = running
    if on_cpu:
        longest = config.max_context_tokens or min(context or EMBEDDED_CONTEXT_TOKENS, EMBEDDED_CONTEXT_TOKENS)
        flags |= {"--device": "cpu", "--max-total-tokens": (running or 1) * (longest + CONTEXT_HEADROOM)}
    else:
        flags["--base-gpu-id"] = first_gpu(config, index)
    if on_cpu:
        environment |= {"OMP_NUM_THREADS": str(CPU_THREADS), "MKL_NUM_THREADS": str(CPU_THREADS)}
    if config.api_key_env is not None:
        flags["--api-key-env"] = config.api_key_env
    ours = [
        str(word) for flag, value in flags.items() if flag_value(extra_arguments, flag) is None for word in (flag, value)
    ]
    return Recipe(
        command=(python, str(LAUNCHER), "--exit-with-stdin", *ours, *extra_arguments),
        environment=environment,
        ready=_READY,
        url=base_url(config.host, port),
        log_path=log_path,
        gpus=0 if on_cpu else tensor_parallel(config),
    )


def base_url(host: str, port: int | str) -> str:
    """Return the URL of a server.

    Example:
        >>> base_url("127.0.0.1", 8000), base_url("::1", 8000)
        ('http://127.0.0.1:8000', 'http://[::1]:8000')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _positions(model_path: Path) -> int | None:
    try:
        config: dict[str, Any] = json.loads((model_path / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # the server itself reports what is wrong with its model
    limit = (config.get("text_config") or config).get("max_position_embeddings")
    return limit if isinstance(limit, int) else None
