"""Launches the servers of a config, or attaches to running ones, and yields a pool over them.

Invariant: when the block is left, every process that it started has ended. Inside it, the pool learns at once of a process
that ended or froze. By policy such a process, and that of a server taken out of the pool, is started again; it serves once
it has the current weights.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio

from agentrl.errors import ConfigError, ServerError, ServerUnavailable
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.inference.config import CPU_RUNNING_REQUESTS, CPU_THREADS, EMBEDDED_CONTEXT_TOKENS, InferenceConfig
from agentrl.inference.launch.anywhere import recipe_anywhere, with_device
from agentrl.inference.launch.process import Recipe, ServerProcess
from agentrl.inference.launch.sglang import find_sglang_python, sglang_recipe
from agentrl.inference.pool.members import Server
from agentrl.inference.pool.pool import ServerPool
from agentrl.inference.sglang.server import SGLangServer
from agentrl.processes.base import RESTART_WINDOW_S, Launcher, LocalLauncher
from agentrl.support.concurrency import task_group

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Number of times that a server process is started again within `RESTART_WINDOW_S`."""
MAX_PORTS = 3
"""Number of ports that a start tries when another program takes a port between its choice and its use."""
_PORT_TAKEN = re.compile(r"(?i)address already in use|cannot listen on .*in use")
_READY_EMBEDDED = re.compile(r'^\{.*"url": ?"(http[^"]+)"')


class Launched(NamedTuple):
    """A server process that is ready."""

    process: ServerProcess
    url: str


@asynccontextmanager
async def launch_pool(
    config: InferenceConfig,
    *,
    model_path: str | Path,
    vocab_size: int,
    seed: int = 0,
    log_dir: str | Path,
    launcher: Launcher | None = None,
    max_adapter_lag: int | None = None,
) -> AsyncGenerator[ServerPool, None]:
    """Yield a pool over the servers of a config, launched here or already running.

    Launched servers start with the HF checkpoint at `model_path`; server n samples by `seed + n`. Without a `launcher` they
    run on this machine. Every id sent or received is below `vocab_size`. `max_adapter_lag` is that of `SGLangServer`.

    Raises:
        ConfigError: the named key or SGLang's Python is missing, or servers accept less context than the config asks for.
        ServerError: a server did not start; the message has the reason and the end of its log.
    """
    key = api_key(config)
    launcher = launcher or LocalLauncher()
    if launcher.elsewhere:
        config = with_device(config, has_gpus=await launcher.reserves_gpus())
    builders = [] if config.urls else _builders(config, Path(model_path), seed, Path(log_dir), launcher)
    launched: dict[int, Launched] = {}

    def server_at(url: str) -> SGLangServer:
        return SGLangServer(
            url,
            vocab_size=vocab_size,
            api_key=key,
            request_timeout_s=config.request_timeout_s,
            control_timeout_s=config.control_timeout_s,
            max_adapter_lag=max_adapter_lag,
        )

    try:
        with PortReserve(config.host) as ports:
            async with task_group() as tasks:
                await _start_all(config, builders, ports, tasks, launched, launcher)
                urls = config.urls or [launched[index].url for index in range(len(builders))]
                async with ServerPool([server_at(url) for url in urls], config) as pool:
                    for each in launched.values():
                        watch = partial(supervise, each.process, each.url, pool, tasks, config, server_at=server_at)
                        tasks.start_soon(watch)
                    _check_context(config, pool)
                    yield pool
                tasks.cancel_scope.cancel()
    finally:
        await _stop([each.process for each in launched.values()])


def _check_context(config: InferenceConfig, pool: ServerPool) -> None:
    wanted, granted = config.max_context_tokens, pool.max_context_tokens
    if wanted is not None and granted is not None and granted < wanted:
        raise ConfigError(
            f"inference.max_context_tokens: {wanted} is more than the {granted} that every server is sure to give a call, "
            "by its context length and cache memory; lower it, or start the servers with a longer context or more memory"
        )


def api_key(config: InferenceConfig) -> str | None:
    """Return the servers' key from the environment variable that the config names; None if it names none."""
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(f"inference.api_key_env: the environment variable {config.api_key_env} is not set")
    return key


async def start_server(
    build: Callable[[int], Recipe],
    take_port: Callable[[], int],
    tasks: anyio.abc.TaskGroup,
    timeout_s: float,
    launcher: Launcher,
) -> Launched:
    """Start a server and return it once it is ready; if another program took its port, try again on another port."""
    for attempt in range(MAX_PORTS):
        process = ServerProcess(build(take_port()), launcher)
        try:
            return Launched(process, await process.start(tasks, timeout_s))
        except ServerUnavailable as error:
            if attempt + 1 == MAX_PORTS or not _PORT_TAKEN.search(str(error)):
                raise
            logger.warning("%s: another program took its port; starting it on another port", process.recipe.log_path.stem)
    raise AssertionError("the last attempt returns or raises")


async def _start_all(
    config: InferenceConfig,
    builders: Sequence[Callable[[int], Recipe]],
    ports: PortReserve,
    tasks: anyio.abc.TaskGroup,
    launched: dict[int, Launched],
    launcher: Launcher,
) -> None:
    async def start(index: int) -> None:
        launched[index] = await start_server(builders[index], ports.take, tasks, config.start_timeout_s, launcher)

    async with task_group() as starting:
        for index in range(len(builders)):
            starting.start_soon(start, index)


async def supervise(
    process: ServerProcess,
    url: str,
    pool: ServerPool,
    tasks: anyio.abc.TaskGroup,
    config: InferenceConfig,
    *,
    window_s: float = RESTART_WINDOW_S,
    server_at: Callable[[str], Server] | None = None,
) -> None:
    """Start a server again when its process ends or freezes, or the pool takes it out; not under the policy `stop`.

    At most `MAX_RESTARTS` starts are made within `window_s`; a failed start counts. The pool is notified of each end and
    each start. `server_at` makes the client of a server that comes up at another address, as after the loss of its node.

    Cancellation: the process may still run; the caller must `stop` it.
    """
    reason: str | None = None
    allowed = 0 if config.on_server_failure == "stop" else MAX_RESTARTS
    starts: list[float] = []
    while True:
        if reason is None:
            pool.report_kept(url, kept=len(starts) < allowed)
            reason = await _unfit(process, url, pool)
        starts = [start for start in starts if anyio.current_time() - start < window_s]
        again = len(starts) < allowed
        note = "" if again else f"it was started again {len(starts)} times within {window_s:g} s, so it stays out for good"
        pool.report_dead(url, reason, starting=again, note=note if allowed else "")
        await process.stop()
        if not again:
            logger.warning("%s; %s", reason, note)
            return
        logger.warning("%s; starting it again", reason)
        starts.append(anyio.current_time())
        try:
            started_at = await process.start(tasks, config.start_timeout_s)
        except ServerError as error:
            reason = f"could not be started again: {error}"
        else:
            if server_at is not None and started_at.rstrip("/") != url.rstrip("/"):
                await pool.replace(url, server_at(started_at))
                url = started_at
            pool.report_started(url)
            reason = None


async def _unfit(process: ServerProcess, url: str, pool: ServerPool) -> str:
    """Return the reason once the process has ended, its server gives no answer, or the pool has taken the server out."""
    reasons: list[str] = []
    async with task_group() as waiting:

        async def wait(ending: Callable[[], Awaitable[str]]) -> None:
            reasons.append(await ending())
            waiting.cancel_scope.cancel()

        async def frozen() -> str:
            return f"{process.named} {await pool.until_frozen(url)}"

        waiting.start_soon(wait, process.ended)
        waiting.start_soon(wait, frozen)
        waiting.start_soon(wait, partial(pool.until_taken_out, url))
    return reasons[0]


async def _stop(processes: list[ServerProcess]) -> None:
    with anyio.CancelScope(shield=True):  # each ends within 5 s
        async with task_group() as stopping:
            for process in processes:
                stopping.start_soon(process.stop)


def _builders(
    config: InferenceConfig, model_path: Path, seed: int, log_dir: Path, launcher: Launcher
) -> list[Callable[[int], Recipe]]:
    """Return, for each server to launch, a function that builds its recipe for a port."""
    build = _embedded_recipe if config.backend == "embedded" else sglang_recipe
    if config.backend == "sglang" and not launcher.elsewhere:
        find_sglang_python(config)

    def builder(index: int) -> Callable[[int], Recipe]:
        log_path = log_dir / f"server-{index}.log"
        if launcher.elsewhere:
            anywhere = recipe_anywhere(build, config, model_path, seed + index, log_path)
            return lambda _port: anywhere
        return lambda port: build(config, model_path, seed, index, port, log_path)

    return [builder(index) for index in range(config.servers)]


def _embedded_recipe(
    config: InferenceConfig, model_path: Path, seed: int, index: int, port: int | str, log_path: Path
) -> Recipe:
    options: dict[str, object] = {
        "--model-path": model_path,
        "--host": config.host,
        "--port": port,
        "--random-seed": seed + index,
        "--device": config.device,
        "--dtype": config.dtype or "float32",
        "--threads": CPU_THREADS,
        "--max-running-requests": config.max_running_requests or CPU_RUNNING_REQUESTS,
        "--max-context-tokens": (config.max_context_tokens or EMBEDDED_CONTEXT_TOKENS) + CONTEXT_HEADROOM,
    }
    if config.api_key_env is not None:
        options["--api-key-env"] = config.api_key_env
    flags = [str(word) for pair in options.items() for word in pair]
    return Recipe(
        command=(sys.executable, "-m", "agentrl.servers.serve", *flags, "--exit-with-stdin"),
        environment={"OMP_NUM_THREADS": str(CPU_THREADS), "MKL_NUM_THREADS": str(CPU_THREADS)},
        ready=(_READY_EMBEDDED,),
        url="",
        log_path=log_path,
    )


class PortReserve:
    """Reserves free ports: until the block ends, only the server that a port is meant for can listen on it.

    On Linux no program that asks for any free port gets that of a bound socket which does not listen, if both sides set
    SO_REUSEADDR. A program that asks for this very number can still get it; then `start_server` tries another port.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._held = ExitStack()

    def __enter__(self) -> PortReserve:
        return self

    def __exit__(self, *_error: object) -> None:
        self._held.close()

    def take(self) -> int:
        held = self._held.enter_context(socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((self._host, 0))
        except OSError as error:
            raise ConfigError(
                f"inference.host: cannot listen on {self._host}: {error.strerror or error}; set an address of this machine"
            ) from error
        return int(held.getsockname()[1])
