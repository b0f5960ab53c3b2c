"""`agentrl serve`: the embedded server with the OpenAI API, started by hand; programs start `agentrl.servers.serve`.

Invariant: an interrupt ends the server and then the process, with one message and the exit status of every command; further
interrupts change nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NoReturn

from rich.console import Console

from agentrl.client.config import SamplingConfig
from agentrl.commands.running import parse_named_values
from agentrl.errors import ConfigError
from agentrl.processes.watchdog.signals import interrupt_from, print_interrupt
from agentrl.servers.embedded.faults import parse_faults
from agentrl.servers.http.app import AddRoutes
from agentrl.servers.serve import ServeOptions, run_server
from agentrl.tokens.renderer import Renderer
from agentrl.types import ToolFormatName
from agentrl.weights.merging import whole_model
from agentrl_doors.gateway import Gateway


def serve_command(
    model: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    device: str = "auto",
    dtype: Literal["float32", "bfloat16"] = "float32",
    threads: int = 1,
    max_running_requests: int = 64,
    max_context_tokens: int = 4096,
    api_key_env: str | None = None,
    served_model_name: str | None = None,
    template_option: tuple[str, ...] = (),
    tool_format: ToolFormatName = "auto",
    unsupported: Literal["refuse", "prompt"] = "refuse",
    allow_origin: tuple[str, ...] = (),
    fault: tuple[str, ...] = (),
) -> None:
    """Serve a checkpoint with the embedded server: SGLang's HTTP protocol, and the OpenAI API under /v1.

    Args:
        model: Local HF checkpoint of a Qwen2, Qwen3 or Llama architecture.
        host: Address to listen on; anything but loopback needs --api-key-env.
        port: Port to listen on; 0 picks a free one.
        device: auto, cpu, cuda or cuda:N.
        dtype: Type of the weights, and in which the server computes; bfloat16 takes half the memory.
        threads: CPU threads.
        max_running_requests: Sequences that are decoded together.
        max_context_tokens: Largest sum of context and output tokens of one request.
        api_key_env: Environment variable with the key that clients must send.
        served_model_name: Name of the model in the OpenAI API; the default is the name of the checkpoint's folder.
        template_option: Variable of the chat template as name=value, such as enable_thinking=false; may be repeated.
        tool_format: Form of tool calls; auto, or hermes for a chat template without tools.
        unsupported: Structured output and forced tool calls: refuse them, or ask for them in the prompt.
        allow_origin: Origin of a web page that may call the OpenAI API, such as http://localhost:3000; may be repeated.
        fault: A fault of SGLang to imitate, for tests of clients; may be repeated. `sglang` stands for all of them.
    """
    sampling, template_options = (
        SamplingConfig(unsupported=unsupported, tool_format=tool_format),
        parse_named_values(template_option),
    )
    if not model.is_dir():
        raise ConfigError(f"{model}: expected a local HF checkpoint (config.json, *.safetensors, tokenizer)")
    options = ServeOptions(
        model_path=str(whole_model(model)),
        host=host,
        port=port,
        api_key=_key_of(api_key_env),
        device=device,
        dtype=dtype,
        threads=threads,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        faults=parse_faults(fault),
        allowed_origins=allow_origin,
    )
    _serve_checkpoint(options, served_model_name or model.resolve().name, template_options, sampling)


def _key_of(variable: str | None) -> str | None:
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ConfigError(f"--api-key-env {variable}: this environment variable is not set; export it, or drop the flag")
    return key


def _serve_checkpoint(
    options: ServeOptions, name: str, template_options: Mapping[str, bool | int | str], sampling: SamplingConfig
) -> None:
    """Serve until an interrupt ends the process; print the URL once the server answers."""
    model = Path(options.model_path)
    console = Console(file=sys.stderr, soft_wrap=True, markup=False, highlight=False)
    try:
        add_routes = _openai_routes(model, name, template_options, sampling, console)
        api = "" if add_routes is None else f"with the OpenAI API at {{}}/v1 as model {name} "
        run_server(
            options,
            on_ready=lambda url: console.print(f"serving {model} at {url} {api.format(url)}(Ctrl-C ends it)"),
            on_signal=lambda number: _end_process(interrupt_from(number)),
            add_routes=add_routes,
        )
    except KeyboardInterrupt as interrupt:  # while the model was loading
        _end_process(interrupt)


def _openai_routes(
    model: Path, name: str, template_options: Mapping[str, bool | int | str], sampling: SamplingConfig, console: Console
) -> AddRoutes | None:
    """Return the function that adds the routes under /v1; None, and a warning, for a checkpoint without a chat template."""
    try:
        renderer = Renderer.load(model, template_options=template_options, tool_format=sampling.tool_format)
    except ConfigError as error:
        console.print(f"warning: no OpenAI API: {error}", style="yellow")
        return None
    return Gateway(renderer, model=name, sampling=sampling).add_to


def _end_process(interrupt: KeyboardInterrupt) -> NoReturn:
    """Print that the server has ended, and exit at once.

    With torch loaded the interpreter ends slowly, and a second signal would give the process another exit status.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    status = print_interrupt(interrupt)
    sys.stderr.flush()
    os._exit(status)
