"""Settings of the inference servers, and the GPUs that launched servers take by them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, HttpUrl, TypeAdapter, ValidationError, field_validator

from agentrl.config.base import Config, Device, Words
from agentrl.errors import ConfigError

EMBEDDED_CONTEXT_TOKENS = 4096
"""Longest context plus output of one request on an embedded server, unless the config sets another."""
CPU_THREADS = 1
"""CPU threads of each server without a GPU: the fastest if server and trainer share two cores."""
CPU_RUNNING_REQUESTS = 64
"""Sequences that a server on a CPU decodes together, unless the config sets another number."""
_ADDRESSES = TypeAdapter(tuple[HttpUrl, ...])
_SGLANG_ELSEWHERE = {
    "--api-key": "set inference.api_key_env; a key on a command line can be read by everyone on the machine",
    "--admin-api-key": "agentrl does not use one; remove it",
    "--host": "set inference.host",
    "--port": "agentrl picks free ports; to choose them, start the servers yourself and name them in inference.urls",
    "--model-path": "set model.path",
    "--random-seed": "set seed",
    "--dtype": "set inference.dtype",
    "--log-level": "agentrl reads from SGLang's log when it is ready; remove it",
}
_TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")


def has_credentials(url: str) -> bool:
    """Return whether a base URL may hold a user or a password: any "@" counts, because a password may hold a "/".

    Example:
        >>> has_credentials("http://me:secret@10.0.0.7:30000"), has_credentials("http://10.0.0.7:30000")
        (True, False)
    """
    return "@" in url


class InferenceConfig(Config):
    """The servers that sample the tokens, and the deadlines of their calls."""

    model_config = ConfigDict(hide_input_in_errors=True)  # a refused URL may hold a password

    backend: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: agentrl's own small server, for CPUs and tests. `sglang`: SGLang servers, over HTTP."""
    urls: Words = ()
    """Base URLs of servers that already run; empty means: launch `servers` of them here."""
    servers: int = Field(default=1, ge=1)
    """Servers to launch when `urls` is empty."""
    host: str = "127.0.0.1"
    """Address that launched servers listen on; any address but loopback needs `api_key_env`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key; never recorded, logged or put on a command line."""
    sglang_python: str | None = None
    """Python of SGLang's environment. None: `$AGENTRL_SGLANG_PYTHON`, else `.sglang-venv` here or in agentrl's clone."""
    sglang_args: Words = ()
    """Extra arguments of launched SGLang servers; they override those that agentrl derives from the other fields."""
    device: Device = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`, the GPU of the first server; others use the next."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type that servers compute in; for running servers, the type they were started with. None: the trainer's type."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Sequences decoded together; others wait in the server's queue. None: 64 on a CPU, SGLang's own choice on a GPU."""
    max_context_tokens: int | None = Field(default=None, ge=8)
    """Longest context plus output of one request, tokens. None: 4096 if embedded, the model's positions for SGLang."""
    pause_mode: Literal["exact", "fast", "pinned"] | None = None
    """Of running calls at an update. `exact` (retract, flush): a recompute gives the recorded log-probs. `fast` (in place):
    stale KV, error reported. `pinned`: they keep their adapter. None: pinned with `sync.adapter: adapter`, else exact."""
    request_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one model call, seconds, including its time in the queue."""
    request_retries: int = Field(default=2, ge=0)
    """Number of times that a call is sent again after a server died or refused it."""
    control_timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one control call (pause, update, continue), seconds; large models on slow disks need more."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Deadline of a launched server's first answer, seconds."""
    health_interval_s: float = Field(default=4.0, gt=0)
    """Seconds between health checks of a server, and the deadline of each; two without an answer: the server is frozen."""
    on_server_failure: Literal["evict", "stop"] = "evict"
    """`evict`: continue with the other servers, and take the server back when it answers again; `stop`: end the run."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if any(map(has_credentials, given)):
            raise ValueError(
                "a URL holds a user or a password, which would be written to the run's files; leave it out, and name the "
                "environment variable with the servers' key in inference.api_key_env"
            )
        try:
            urls = tuple(str(url).rstrip("/") for url in _ADDRESSES.validate_python(given))
        except ValidationError as error:
            raise ValueError(f"expected base URLs such as http://10.0.0.7:30000, got {', '.join(given)!r}") from error
        if len({*urls}) < len(urls):
            raise ValueError(f"expected each server once, got {', '.join(urls)}")
        return urls

    @field_validator("sglang_args")
    @classmethod
    def _not_elsewhere(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for argument in given:
            if (fix := _SGLANG_ELSEWHERE.get(argument.partition("=")[0])) is not None:
                raise ValueError(f"{argument.partition('=')[0]} does not belong here; {fix}")
        return given

    @property
    def context_limit(self) -> int | None:
        """Longest context plus output of one request, which the client enforces; None: the model's own."""
        if self.max_context_tokens is None and self.backend == "embedded" and not self.urls:
            return EMBEDDED_CONTEXT_TOKENS
        return self.max_context_tokens


def gpu_is_present(root: Path = Path("/")) -> bool:
    """Return whether this machine has a GPU that this process may use, according to the system's files."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    devices = [*(root / "dev").glob("nvidia[0-9]*"), *(root / "proc/driver/nvidia/gpus").glob("*")]
    return bool(devices) or (root / "dev/kfd").exists()


def flag_value(arguments: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of the flags `names` in `arguments`; None if there is none.

    Example:
        >>> flag_value(["--device", "cpu", "--tp=2"], "--tp", "--tp-size"), flag_value(["--tp", "2"], "--device")
        ('2', None)
    """
    last: str | None = None
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            last = value if equals else "".join(arguments[at + 1 : at + 2])
    return last


def runs_on_cpu(config: InferenceConfig) -> bool:
    """Return whether launched SGLang servers compute on the CPU."""
    device = flag_value(config.sglang_args, "--device") or config.device
    return not gpu_is_present() if device == "auto" else device == "cpu"


def tensor_parallel(config: InferenceConfig) -> int:
    """Return how many GPUs one launched SGLang server takes; a `ConfigError` if `sglang_args` gives no number."""
    given = flag_value(config.sglang_args, *_TENSOR_PARALLEL) or "1"
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"inference.sglang_args: {_TENSOR_PARALLEL[0]} {given}: expected a number of GPUs")
    return int(given)


def first_gpu(config: InferenceConfig, index: int) -> int:
    """Return the number of the first GPU of launched SGLang server `index`; no two servers share a GPU.

    Example:
        >>> first_gpu(InferenceConfig(sglang_args=("--tp", "2")), 3), first_gpu(InferenceConfig(device="cuda:4"), 1)
        (6, 5)
    """
    return int(config.device.partition(":")[2] or 0) + index * tensor_parallel(config)
