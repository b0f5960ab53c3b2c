"""Real servers for tests: an SGLang of its own environment, or agentrl's embedded server, as processes started by agentrl.

Invariant: a server started here has ended when its block is left, and `reset` leaves it as it was started: running, idle,
with an empty cache and the base weights under version "0".
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from anyio.from_thread import start_blocking_portal

from agentrl.inference.backend import CONTEXT_HEADROOM, CONTEXT_RESERVE
from agentrl.inference.config import InferenceConfig
from agentrl.inference.launch.pool import launch_pool
from agentrl.servers.scripted.engine import ScriptedEngine
from agentrl.servers.serve import serving
from agentrl.weights.tensors import model_checksum, read_safetensors
from agentrl.weights.types import Publication
from tests.support.tiny import tiny_checkpoint

Launched = Literal["embedded", "sglang"]
"""A server that runs in a process of its own."""
Kind = Launched | Literal["scripted"]
CONTROL_S = 60.0
"""Deadline of one control call, seconds; a server that needs longer hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that answers, and what it can be given."""

    url: str
    kind: Kind
    vocab_size: int
    context: int
    """The server's own context length, tokens; a prompt ends `CONTEXT_RESERVE` + 1 short of it, an output 2 short."""
    checkpoints: dict[int, Path]
    """Version n -> checkpoint directory; different weights, one tokenizer. Between tests the server has version 0."""
    first_version: str
    """What it called its weights when it was started."""
    log_path: Path

    @property
    def tokens_of_a_second(self) -> int:
        """Output limit of a call that takes the server a second or more, with which a late control call still meets it."""
        return 1600 if self.kind == "embedded" else 600


class Answer(NamedTuple):
    """Status and body of a control call; JSON is decoded, other bodies are text."""

    status: int
    body: Any


def call(url: str, path: str, body: object | None = None, *, timeout_s: float = CONTROL_S) -> Answer:
    """POST `body` as JSON, or GET when it is None; blocks. For set-up and tear-down, not for tests of concurrency."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return Answer(response.status, decoded(response.read()))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, decoded(error.read()))


def decoded(data: bytes) -> Any:  # noqa: ANN401 - JSON as it comes
    """Return a reply's body: JSON as values, anything else as text."""
    return json.loads(data) if data[:1] in (b"{", b"[") else data.decode()


def tiny_checkpoints(folder: Path, count: int = 4) -> dict[int, Path]:
    """Write `count` tiny Qwen3 checkpoints with different random weights and one tokenizer; version n -> directory.

    Their spread keeps float32 rounding a few times under the 1e-5 nats that log-probs are judged by.
    """
    return {version: tiny_checkpoint(folder / f"v{version}", seed=version, spread=0.15) for version in range(count)}


def publication(server: RunningServer, version: int, *, checkpoint: int | None = None) -> Publication:
    """Return the `Publication` of a checkpoint of `server` under `version`; by default the checkpoint of that number."""
    return publication_of(server.checkpoints[version if checkpoint is None else checkpoint], version)


def publication_of(path: Path, version: int) -> Publication:
    """Return the `Publication` of the checkpoint in `path` under `version`, with the digests of its tensors."""
    tensors = read_safetensors(path / "model.safetensors")
    sums = {name: tensor.checksum(name) for name, tensor in tensors.items()}
    return Publication(version=version, path=str(path), checksum=model_checksum(sums), tensor_checksums=sums)


@contextmanager
def running_server(
    kind: Launched, checkpoints: dict[int, Path], folder: Path, *, extra: tuple[str, ...] = ()
) -> Generator[RunningServer]:
    """Start a server with agentrl's own launcher and yield it once it answers.

    Args:
        kind: which.
        checkpoints: version 0 is what it starts with.
        folder: for its log.
        extra: more SGLang arguments.

    Raises:
        ConfigError: SGLang is not installed; says how.
    """
    from transformers import AutoConfig

    vocab_size = int(AutoConfig.from_pretrained(checkpoints[0]).vocab_size)
    config = InferenceConfig(
        backend=kind,
        sglang_args=extra if kind == "sglang" else (),
        device="cpu",
        on_server_failure="stop",  # a server that dies under a test is a finding, not something to start again
        health_interval_s=3600.0,  # the tests alone talk to the server
        start_timeout_s=300.0,
    )
    with (
        start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(
            launch_pool(config, model_path=checkpoints[0], vocab_size=vocab_size, log_dir=folder)
        ) as pool,
    ):
        url = portal.call(pool.describe).servers[0].url
        info = call(url, "/server_info").body
        yield RunningServer(
            url=url,
            kind=kind,
            vocab_size=vocab_size,
            context=info["max_req_input_len"] + CONTEXT_RESERVE,
            checkpoints=checkpoints,
            first_version=call(url, "/model_info").body["weight_version"],
            log_path=folder / "server-0.log",
        )


@contextmanager
def scripted_as_running(checkpoints: dict[int, Path]) -> Generator[RunningServer]:
    """Serve the scripted engine, whose answers are 1, 2, 3, ..., with the limits of the embedded server."""
    context, vocab_size = 4096 + CONTEXT_HEADROOM, 384
    ids = [n % vocab_size for n in range(1, 2 * context)]
    engine = ScriptedEngine(lambda _: ids, vocab_size=vocab_size, max_context_tokens=context)
    with start_blocking_portal("asyncio") as portal, portal.wrap_async_context_manager(serving(engine)) as url:
        yield RunningServer(
            url=url,
            kind="scripted",
            vocab_size=vocab_size,
            context=context,
            checkpoints=checkpoints,
            first_version=call(url, "/model_info").body["weight_version"],
            log_path=Path(os.devnull),
        )


def reset(server: RunningServer) -> None:
    """Bring the server back to running, idle, an empty cache, no open session, and the base weights under version "0"."""
    url = server.url
    _demand(call(url, "/continue_generation", {}), "continue")
    _demand(call(url, "/abort_request", {"abort_all": True}), "abort all requests")
    _demand(call(url, "/flush_cache?timeout=30", {}), "flush its cache once idle")
    call(url, "/end_weight_update", {})  # refused, rightly, where no session was left open
    update = {"model_path": str(server.checkpoints[0]), "weight_version": "0"}
    _demand(call(url, "/update_weights_from_disk", update), "load the base weights")


def is_reset(server: RunningServer) -> bool:
    """Return whether the server says that it runs with the base weights as version "0"; cheaper than `reset`."""
    info = call(server.url, "/model_info").body
    base = (info["weight_version"], info["model_path"]) == ("0", str(server.checkpoints[0]))
    return base and call(server.url, "/ready").status == 200


def _demand(answer: Answer, what: str) -> None:
    if answer.status != 200:
        raise AssertionError(f"the server did not {what}: HTTP {answer.status}: {answer.body}")
