"""`agentrl serve`: the embedded server on a checkpoint, for people; programs start `agentrl.servers.serve`.

Invariant: an interrupt ends the server first, and then the process, with one message and the status of `interrupts`;
further interrupts change nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from agentrl.errors import ConfigError
from agentrl.servers.embedded.faults import parse_faults
from agentrl.servers.serve import ServeOptions, run_server
from agentrl.watchdog.signals import say_stopped, stop_of


def serve_checkpoint(
    model: Path,
    *,
    host: str,
    port: int,
    device: str,
    threads: int,
    max_running_requests: int,
    max_context_tokens: int,
    api_key_env: str | None,
    faults: Sequence[str] = (),
) -> None:
    """Serve until interrupted, which ends the process; says where, once the server answers.

    Raises:
        ConfigError: the checkpoint, the device, the address, a number or the key cannot be used, or a fault is not known.
    """
    if not model.is_dir():
        raise ConfigError(f"{model}: expected a local HF checkpoint (config.json, *.safetensors, tokenizer)")
    key = None if api_key_env is None else os.environ.get(api_key_env)
    if api_key_env is not None and not key:
        raise ConfigError(f"--api-key-env {api_key_env}: this environment variable is not set; export it, or drop the flag")
    options = ServeOptions(
        model_path=str(model),
        host=host,
        port=port,
        api_key=key,
        device=device,
        threads=threads,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        faults=parse_faults(faults),
    )
    console = Console(file=sys.stderr)
    said = "serving {} at {} (Ctrl-C ends it)"
    try:
        run_server(
            options,
            on_ready=lambda url: console.print(said.format(model, url), soft_wrap=True),
            on_signal=lambda number: _leave(stop_of(number)),
        )
    except KeyboardInterrupt as stop:  # while the model was loaded
        _leave(stop)


def _leave(stop: KeyboardInterrupt) -> NoReturn:
    """Say that the server has ended, and end the process here.

    With torch loaded the interpreter takes its time to end, and a second signal in that time would end it another way.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    status = say_stopped(stop)
    sys.stderr.flush()
    os._exit(status)
