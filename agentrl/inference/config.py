"""Settings of the inference servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.configbase import Config


class InferenceConfig(Config):
    """Which servers sample the tokens, and how patient to be with them."""

    backend: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: agentrl's own small server, for CPUs and tests. `sglang`: SGLang servers, over HTTP."""
    urls: tuple[str, ...] = ()
    """Base URLs of servers that already run; empty means: launch `servers` of them here."""
    servers: int = Field(default=1, ge=1)
    """Servers to launch when `urls` is empty."""
    host: str = "127.0.0.1"
    """Address launched servers listen on; anything but loopback needs `api_key_env`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key. Never recorded; SGLang takes it on its command line."""
    sglang_python: str | None = None
    """Python of the environment SGLang is installed in; needed to launch `sglang` servers."""
    sglang_args: tuple[str, ...] = ()
    """Extra command-line arguments of launched SGLang servers."""
    device: str = "auto"
    """Embedded: `auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`."""
    max_running_requests: int = Field(default=64, ge=1)
    """Embedded: sequences decoded together; more waits in the server's queue."""
    max_context_tokens: int = Field(default=4096, ge=8)
    """Embedded: longest context plus output of one request, in tokens; sizes the KV cache."""
    threads: int = Field(default=1, ge=1)
    """Embedded: CPU threads of each server; one each for server and trainer is fastest on two cores."""
    pause_mode: Literal["retract", "in_place"] = "retract"
    """`retract`: each token's recorded log-prob equals a recompute under its version. `in_place`: keeps stale KV."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one model call, seconds, queueing included."""
    request_retries: int = Field(default=2, ge=0)
    """Times a call is sent again after a server died or refused it."""
    control_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one control call (pause, update, continue), seconds; large models on slow disks need more."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline for a launched server to answer, seconds."""
    health_interval_s: float = Field(default=5.0, gt=0)
    """Seconds between liveness probes of each server."""
    on_server_failure: Literal["evict", "stop"] = "evict"
    """`evict`: go on with the other servers, take it back when it answers again; `stop`: end the run."""
