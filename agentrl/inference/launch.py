"""From a config to a pool: servers are launched here or attached to, watched, and ended with the block.

Invariant: when the block is left, every process it started has ended. While it runs, the pool hears at once of a process
that ended; by policy the process is started again, and serves after the pool has given it the current weights.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio

from agentrl.errors import ConfigError, ServerError
from agentrl.inference.config import InferenceConfig
from agentrl.inference.pool import ServerPool
from agentrl.inference.process import Recipe, ServerProcess
from agentrl.inference.scope import task_group
from agentrl.inference.sglang import SGLangServer

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Times one server process is started again in a run."""
_READY_SGLANG = re.compile(r"The server is fired up and ready to roll|Uvicorn running on")
_READY_EMBEDDED = re.compile(r'^\{.*"url": ?"(http[^"]+)"')
_SGLANG_CPU = ("--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "16384")
_SGLANG_CPU_LAUNCHER = Path(__file__).parents[2] / "scripts" / "sglang_launcher.py"


@asynccontextmanager
async def launch_pool(
    config: InferenceConfig, *, model_path: str | Path, vocab_size: int, seed: int = 0, log_dir: str | Path
) -> AsyncGenerator[ServerPool, None]:
    """Yield a pool over the servers of a config, launched here or already running.

    Args:
        config: which servers.
        model_path: HF checkpoint that launched servers start with.
        vocab_size: ids sent and received are below it.
        seed: of the servers' sampling; server n gets `seed + n`.
        log_dir: directory for the logs of launched servers.

    Raises:
        ConfigError: the named key or SGLang's Python is missing.
        ServerError: a server did not start; says why, with the end of its log.

    Cancellation: every process started here has ended, within 5 seconds.
    """
    key = api_key(config)
    recipes = [] if config.urls else _recipes(config, Path(model_path), seed, Path(log_dir))
    processes = [ServerProcess(recipe) for recipe in recipes]
    try:
        async with task_group() as tasks:
            urls = await _start(processes, tasks, config) if processes else list(config.urls)
            servers = [
                SGLangServer(
                    url,
                    vocab_size=vocab_size,
                    api_key=key,
                    request_timeout_s=config.request_timeout_s,
                    control_timeout_s=config.control_timeout_s,
                )
                for url in urls
            ]
            async with ServerPool(servers, config) as pool:
                for process, url in zip(processes, urls, strict=False):
                    tasks.start_soon(_supervise, process, url, pool, tasks, config)
                yield pool
            tasks.cancel_scope.cancel()
    finally:
        await _stop(processes)


def api_key(config: InferenceConfig) -> str | None:
    """Return the servers' key from the environment variable the config names; None where it names none.

    Raises:
        ConfigError: the variable is not set.
    """
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(f"inference.api_key_env: the environment variable {config.api_key_env} is not set")
    return key


async def _start(processes: list[ServerProcess], tasks: anyio.abc.TaskGroup, config: InferenceConfig) -> list[str]:
    urls = [""] * len(processes)

    async def start(index: int) -> None:
        urls[index] = await processes[index].start(tasks, config.start_timeout_s)

    async with task_group() as starting:
        for index in range(len(processes)):
            starting.start_soon(start, index)
    return urls


async def _supervise(
    process: ServerProcess, url: str, pool: ServerPool, tasks: anyio.abc.TaskGroup, config: InferenceConfig
) -> None:
    for attempt in range(MAX_RESTARTS + 1):
        reason = await process.ended()
        pool.report_dead(url, reason)
        await process.stop()
        if config.on_server_failure == "stop" or attempt == MAX_RESTARTS:
            return
        logger.warning("%s; starting it again", reason)
        try:
            await process.start(tasks, config.start_timeout_s)
        except ServerError as error:
            pool.report_dead(url, f"could not be started again: {error}")
            return
        pool.report_started(url)


async def _stop(processes: list[ServerProcess]) -> None:
    with anyio.CancelScope(shield=True):  # each ends within 5 s
        async with task_group() as stopping:
            for process in processes:
                stopping.start_soon(process.stop)


def _recipes(config: InferenceConfig, model_path: Path, seed: int, log_dir: Path) -> list[Recipe]:
    build = _embedded_recipe if config.backend == "embedded" else _sglang_recipe
    ports = _free_ports(config.host, config.servers)
    return [
        build(config, model_path, seed, index, port, log_dir / f"server-{index}.log") for index, port in enumerate(ports)
    ]


def _embedded_recipe(config: InferenceConfig, model_path: Path, seed: int, index: int, port: int, log_path: Path) -> Recipe:
    options: dict[str, object] = {
        "--model-path": model_path,
        "--host": config.host,
        "--port": port,
        "--random-seed": seed + index,
        "--device": config.device,
        "--threads": config.threads,
        "--max-running-requests": config.max_running_requests,
        "--max-context-tokens": config.max_context_tokens,
    }
    if config.api_key_env is not None:
        options["--api-key-env"] = config.api_key_env
    flags = [str(word) for pair in options.items() for word in pair]
    return Recipe(
        command=(sys.executable, "-m", "agentrl.inference.serve", *flags, "--exit-with-stdin"),
        environment={"OMP_NUM_THREADS": str(config.threads), "MKL_NUM_THREADS": str(config.threads)},
        ready=_READY_EMBEDDED,
        url="",
        log_path=log_path,
    )


def gpu_flags(args: Sequence[str], index: int) -> list[str]:
    """Return the flags that give SGLang server number `index` GPUs of its own, unless `args` place it already.

    Example:
        >>> gpu_flags(["--tp", "2"], 3), gpu_flags([], 1), gpu_flags(["--base-gpu-id", "4"], 1)
        (['--base-gpu-id', '6'], ['--base-gpu-id', '1'], [])
    """
    if any(arg.startswith("--base-gpu-id") for arg in args):
        return []
    size = 1
    for at, arg in enumerate(args):
        name, _, value = arg.partition("=")
        if name in ("--tp", "--tp-size", "--tensor-parallel-size"):
            size = int(value or args[at + 1])
    return ["--base-gpu-id", str(index * size)]


def _sglang_recipe(config: InferenceConfig, model_path: Path, seed: int, index: int, port: int, log_path: Path) -> Recipe:
    if config.sglang_python is None:
        raise ConfigError("inference.sglang_python: expected the Python of SGLang's environment, to launch servers with it")
    flags = ["--model-path", str(model_path), "--host", config.host, "--port", str(port), "--random-seed", str(seed + index)]
    environment: dict[str, str] = {}
    start = ["-m", "sglang.launch_server"]
    given = config.sglang_args
    if "--device=cpu" in given or ("cpu" in given and given[given.index("cpu") - 1] == "--device"):
        if not _SGLANG_CPU_LAUNCHER.exists():
            raise ConfigError(
                f"inference.sglang_args: --device cpu needs {_SGLANG_CPU_LAUNCHER}, which a clone of agentrl has"
            )
        start = [str(_SGLANG_CPU_LAUNCHER)]
        environment = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        flags += [*_SGLANG_CPU, "--mem-fraction-static", "0.3", "--skip-server-warmup"]
    else:
        flags += gpu_flags(given, index)
    key = api_key(config)
    if key is not None:
        flags += ["--api-key", key]
    return Recipe(
        command=(config.sglang_python, *start, *flags, *given),
        environment=environment,
        ready=_READY_SGLANG,
        url=f"http://{config.host}:{port}",
        log_path=log_path,
        logs_on_stdout=True,
    )


def _free_ports(host: str, count: int) -> list[int]:
    with ExitStack() as probes:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sockets = [probes.enter_context(socket.socket(family)) for _ in range(count)]
        for probe in sockets:
            probe.bind((host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
