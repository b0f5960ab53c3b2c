"""Start and stop an inference server: address, key, readiness, signals. `python -m agentrl.servers.serve` runs one.

Invariant: the server listens on an address off loopback only with a key. It prints one JSON line with its URL once it
answers. SIGTERM, SIGINT and, on request, the end of its standard input stop it within two seconds; requests in flight return
their partial output. A signal that was ignored at the start stays ignored; a signal during the shutdown changes nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Literal

import anyio
import orjson

from agentrl.config.base import DEVICE_PATTERN
from agentrl.errors import AgentRLError, ConfigError
from agentrl.inference.backend import CONTEXT_HEADROOM
from agentrl.processes.frames import open_parent
from agentrl.servers.embedded.faults import SGLangFault, parse_faults
from agentrl.servers.engine import InferenceEngine
from agentrl.servers.http.app import AddRoutes, create_app
from agentrl.servers.listening import BODY_S, HEADERS_S, AllowedOrigins, Connections, check_address, listening


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of an embedded server."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free port."""
    api_key: str | None = None
    weight_version: str = "default"
    """Version of the initial weights; SGLang uses the same default, and agentrl reads it as policy version 0."""
    max_running_requests: int = 64
    max_context_tokens: int = 4096
    """Longest prompt plus output of one request."""
    threads: int = 1
    device: str = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    memory_fraction: float = 0.25
    random_seed: int = 0
    exit_with_stdin: bool = False
    """Stop when standard input closes, so that the server ends with the parent process that holds it open."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the OpenAI API."""
    faults: frozenset[SGLangFault] = frozenset()
    """Faults of SGLang to reproduce, for tests of clients."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, (low, high, default) in _BOUNDS.items():
            given = getattr(self, name)
            if given < low or (high is not None and given > high):
                bounds = f"at least {low}" if high is None else f"{low} to {high}"
                raise ConfigError(f"{_flag(name)}: expected {bounds}, got {given}; leave it out for {default}")
        if not 0 < self.memory_fraction <= 1:
            got = f"{self.memory_fraction:g}; leave it out for 0.25"
            raise ConfigError(f"{_flag('memory_fraction')}: expected over 0 and at most 1, got {got}")
        if re.fullmatch(DEVICE_PATTERN, self.device) is None:
            raise ConfigError(f"{_flag('device')}: expected auto, cpu, cuda or cuda:N, got {self.device!r}")


_BOUNDS: Final = {
    "port": (0, 65_535, "the default; 0 picks a free one"),
    "max_running_requests": (1, None, 64),
    "max_context_tokens": (8, None, 4096),
    "threads": (1, 1024, 1),
    "random_seed": (0, None, 0),
}
"""Lowest value, highest value and default of each option."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@asynccontextmanager
async def serving(
    engine: InferenceEngine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key: str | None = None,
    blocking_health: bool = False,
    headers_s: float = HEADERS_S,
    body_s: float = BODY_S,
    add_routes: AddRoutes | None = None,
    origins: AllowedOrigins | None = None,
) -> AsyncGenerator[str]:
    """Serve `engine` inside the block and yield the base URL. Needs the asyncio event loop.

    Args:
        engine: samples the tokens.
        host: address to listen on.
        port: 0 picks a free one.
        api_key: every call must carry it; None: no call needs a key.
        blocking_health: `/health` waits for a token, as `SGLangFault.BLOCKING_HEALTH` describes.
        headers_s: seconds that a client has to send the headers of a request.
        body_s: seconds that a client has to send the body of a request.
        add_routes: adds routes beside SGLang's own.
        origins: of web pages that may call the OpenAI API; None: no page may.

    Cancellation: requests in flight are finished as aborted, and the port is closed.
    """
    connections = Connections(headers_s)
    app = create_app(
        engine,
        api_key=api_key,
        blocking_health=blocking_health,
        connections=connections,
        body_s=body_s,
        add_routes=add_routes,
        origins=origins,
    )
    async with listening(app, connections, host=host, port=port, api_key=api_key) as url:
        try:
            yield url
        finally:
            engine.abort(abort_all=True)


async def _until_stopped(
    served: AbstractAsyncContextManager[str],
    *,
    exit_with_stdin: bool,
    on_ready: Callable[[str], None],
    on_signal: Callable[[signal.Signals], None] | None,
) -> None:
    """Stay in a block of `serving` until SIGTERM, SIGINT or, on request, the end of standard input or of the parent."""
    handled = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    with anyio.open_signal_receiver(*handled) as signals:
        stop: signal.Signals | None = None
        async with anyio.create_task_group() as group:
            async with served as url:
                on_ready(url)
                if exit_with_stdin:
                    group.start_soon(_end_with_stdin, group.cancel_scope)
                    group.start_soon(_end_with_parent, group.cancel_scope)
                stop = await anext(signals)
            group.cancel_scope.cancel()
        if on_signal is not None and stop is not None:
            on_signal(stop)


async def _end_with_stdin(scope: anyio.CancelScope) -> None:
    descriptor = sys.stdin.fileno()
    try:
        while True:
            await anyio.wait_readable(descriptor)
            if not os.read(descriptor, 4096):
                break
    except OSError:
        # The event loop cannot wait for a file or /dev/null, and no other process could close them.
        return
    scope.cancel()


async def _end_with_parent(scope: anyio.CancelScope) -> None:
    parent = open_parent()
    if parent is None:
        return
    try:
        await anyio.wait_readable(parent)
    finally:
        os.close(parent)
    scope.cancel()


def run_server(
    options: ServeOptions,
    on_ready: Callable[[str], None],
    on_signal: Callable[[signal.Signals], None] | None = None,
    add_routes: AddRoutes | None = None,
) -> None:
    """Load the model and serve it until a signal; this takes over the process (threads, event loop, signals)."""
    check_address(options.host, options.api_key)
    origins = AllowedOrigins(options.allowed_origins)
    import torch

    from agentrl.servers.embedded.engine import EmbeddedEngine, EngineOptions

    torch.set_num_threads(options.threads)
    engine = EmbeddedEngine(
        EngineOptions(
            model_path=options.model_path,
            weight_version=options.weight_version,
            max_running_requests=options.max_running_requests,
            max_context_tokens=options.max_context_tokens + CONTEXT_HEADROOM,
            device=options.device,
            dtype=options.dtype,
            memory_fraction=options.memory_fraction,
            random_seed=options.random_seed,
            faults=options.faults,
        )
    )

    async def main() -> None:
        served = serving(
            engine,
            host=options.host,
            port=options.port,
            api_key=options.api_key,
            blocking_health=SGLangFault.BLOCKING_HEALTH in options.faults,
            add_routes=add_routes,
            origins=origins,
        )
        await _until_stopped(served, exit_with_stdin=options.exit_with_stdin, on_ready=on_ready, on_signal=on_signal)

    anyio.run(main)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m agentrl.servers.serve`; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.servers.serve", description="Serve a small model over HTTP.")
    add = parser.add_argument
    add("--model-path", required=True, help="local Hugging Face model directory")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1); any other than loopback needs a key")
    add("--port", type=int, default=0, help="port to listen on; 0 (default) picks a free one")
    add("--api-key-env", help="environment variable that holds the key; every call must then carry the key")
    add("--weight-version", default="default", help="version of the initial weights (default: default)")
    add("--max-running-requests", type=int, default=64, help="requests that run at once (default 64)")
    add("--max-context-tokens", type=int, default=4096, help="longest prompt plus output of a request (default 4096)")
    add("--threads", type=int, default=1, help="CPU threads for torch (default 1)")
    add("--device", default="auto", help="auto (default), cpu, cuda or cuda:N")
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="type of the weights")
    add("--memory-fraction", type=float, default=0.25, help="share of memory that the KV cache may use (default 0.25)")
    add("--random-seed", type=int, default=0, help="seed for requests that carry none (default 0)")
    add("--fault", action="append", default=[], help="fault of SGLang to reproduce, or sglang for all; may be repeated")
    add("--exit-with-stdin", action="store_true", help="stop when standard input closes or the parent ends")
    options = vars(parser.parse_args(arguments))
    try:
        key_name = options.pop("api_key_env")
        if key_name is not None and not os.environ.get(key_name):
            raise ConfigError(f"--api-key-env: the environment variable {key_name} is not set")
        key = os.environ[key_name] if key_name else None
        run_server(ServeOptions(api_key=key, faults=parse_faults(options.pop("fault")), **options), announce)
    except AgentRLError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def announce(url: str) -> None:
    """Print the line that a parent process waits for: `{"event":"ready","url":...}`."""
    sys.stdout.write(orjson.dumps({"event": "ready", "url": url}).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
