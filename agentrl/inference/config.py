"""Settings of the inference servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, HttpUrl, TypeAdapter, ValidationError, field_validator

from agentrl.configbase import Config, Device, Words

EMBEDDED_CONTEXT_TOKENS = 4096
"""Longest context plus output of one request, where an embedded server is not told."""
CPU_RUNNING_REQUESTS = 64
"""Sequences a server on a CPU decodes together, where it is not told."""
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


class InferenceConfig(Config):
    """Which servers sample the tokens, and how patient to be with them."""

    backend: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: agentrl's own small server, for CPUs and tests. `sglang`: SGLang servers, over HTTP."""
    urls: Words = ()
    """Base URLs of servers that already run; empty means: launch `servers` of them here."""
    servers: int = Field(default=1, ge=1)
    """Servers to launch when `urls` is empty."""
    host: str = "127.0.0.1"
    """Address launched servers listen on; anything but loopback needs `api_key_env`."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' key; never recorded, logged or put on a command line."""
    sglang_python: str | None = None
    """Python of SGLang's environment. None: `$AGENTRL_SGLANG_PYTHON`, else `.sglang-venv` here or in agentrl's clone."""
    sglang_args: Words = ()
    """Extra arguments of launched SGLang servers; they win over what agentrl derives from the other fields."""
    device: Device = "auto"
    """`auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:N`; the GPU of the first server, the others follow."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type the servers compute in; of running ones, what they were started with. None: that of the trainer."""
    max_running_requests: int | None = Field(default=None, ge=1)
    """Sequences decoded together; more wait in the server's queue. None: 64, and SGLang's own choice on a GPU."""
    max_context_tokens: int | None = Field(default=None, ge=8)
    """Longest context plus output of one request, tokens. None: 4096 embedded, the model's positions for SGLang."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each server. None: 1, fastest where server and trainer share two cores; on a GPU SGLang's choice."""
    pause_mode: Literal["exact", "fast"] = "exact"
    """`exact` (retract, flush): a recompute gives the recorded log-probs. `fast` (in place): stale KV; reports the error."""
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

    @field_validator("urls")
    @classmethod
    def _addresses(cls, given: tuple[str, ...]) -> tuple[str, ...]:
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
            if (mend := _SGLANG_ELSEWHERE.get(argument.partition("=")[0])) is not None:
                raise ValueError(f"{argument.partition('=')[0]} does not go here; {mend}")
        return given

    @property
    def context_limit(self) -> int | None:
        """Longest context plus output of one request, to which the client keeps; None: the model's own."""
        if self.max_context_tokens is None and self.backend == "embedded" and not self.urls:
            return EMBEDDED_CONTEXT_TOKENS
        return self.max_context_tokens
