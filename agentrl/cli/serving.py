"""`agentrl serve` and `agentrl chat`: a checkpoint behind a server, and a conversation with it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

from agentrl.cli.running import run_job


def serve_command(
    model: Path,
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    device: str = "auto",
    threads: int = 1,
    max_running_requests: int = 64,
    max_context_tokens: int = 4096,
    api_key_env: str | None = None,
    served_model_name: str | None = None,
    template_option: tuple[str, ...] = (),
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
        threads: CPU threads.
        max_running_requests: Sequences that are decoded together.
        max_context_tokens: Largest sum of context and output tokens of one request.
        api_key_env: Environment variable with the key that clients must send.
        served_model_name: Name of the model in the OpenAI API; the default is the name of the checkpoint's folder.
        template_option: Variable of the chat template as name=value, such as enable_thinking=false; may be repeated.
        unsupported: Structured output and forced tool calls: refuse them, or ask for them in the prompt.
        allow_origin: Origin of a web page that may call the OpenAI API, such as http://localhost:3000; may be repeated.
        fault: A fault of SGLang to imitate, for tests of clients; may be repeated. `sglang` stands for all of them.
    """
    from agentrl.cli.environments import parse_named_values
    from agentrl.jobs.serve import serve_checkpoint

    serve_checkpoint(
        model,
        host=host,
        port=port,
        device=device,
        threads=threads,
        max_running_requests=max_running_requests,
        max_context_tokens=max_context_tokens,
        api_key_env=api_key_env,
        faults=fault,
        served_model_name=served_model_name,
        template_options=parse_named_values(template_option),
        unsupported=unsupported,
        allowed_origins=allow_origin,
    )


def chat_command(
    checkpoint: Path | None = None,
    /,
    *,
    endpoint: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    tools: tuple[str, ...] = (),
    system: str | None = None,
    temperature: float = 0.7,
    max_tokens: int = 1024,
    device: str = "auto",
    template_option: tuple[str, ...] = (),
) -> None:
    """Talk with a checkpoint in the terminal; /reset starts again, /save FILE writes the conversation, Ctrl-D leaves.

    Args:
        checkpoint: Local HF checkpoint; or else --endpoint with --model.
        endpoint: Base URL of an OpenAI-compatible endpoint, such as http://127.0.0.1:30000/v1.
        model: Name of the model at the endpoint.
        api_key_env: Environment variable with the endpoint's key; the default is OPENAI_API_KEY, if that is set.
        tools: A function that the model may call, as module:name; may be repeated. It runs here when it is called.
        system: System message.
        temperature: Sampling temperature; 0 is greedy.
        max_tokens: Longest answer, tokens.
        device: auto, cpu, cuda or cuda:N.
        template_option: Variable of the chat template as name=value, such as enable_thinking=false; may be repeated.
    """
    from agentrl.cli.environments import parse_named_values
    from agentrl.jobs.chat import ChatOptions, chat

    options = ChatOptions(
        checkpoint=checkpoint,
        endpoint=endpoint,
        model=model,
        api_key_env=api_key_env,
        tools=tools,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        device=device,
        template_options=parse_named_values(template_option),
    )
    run_job(partial(chat, options), lambda: "A chat leaves nothing behind but what /save wrote.")
