"""The `agentrl` command: train, eval, serve, sft, doctor.

Invariant: bad input is one clear message and exit status 2; a run that fails is one clear message and exit status 1; Ctrl-C
and SIGTERM end everything that was started and say where the results are. A traceback on the terminal is a bug of ours.
What takes long to import is imported by the commands, where an interrupt is one message.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from agentrl.errors import AgentRLError, ConfigError
from agentrl.watchdog.signals import results_in, say_stopped, sigterm_raises, telling

if TYPE_CHECKING:
    from agentrl.config import RunConfig

Overrides = Annotated[str, Parameter(allow_leading_hyphen=True)]

app = App(
    name="agentrl",
    help="Multi-turn agentic RL of language models. A run is one YAML file; --section.field value sets a field anew.",
    suppress_keyboard_interrupt=False,  # `guarded` has more to say
)


@app.command
def train(
    config: Path, /, *overrides: Overrides, dry_run: bool = False, replace: bool = False, resume: bool = False
) -> None:
    """Train a model on a workflow: starts servers and trainer, runs, writes runs/NAME/.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file set anew, such as --trainer.lr 1e-5 --name second-try.
        dry_run: Print the resolved plan and start nothing.
        replace: Delete an existing runs/NAME/ first; without it an existing one is an error.
        resume: Go on from the newest checkpoint in runs/NAME/.
    """
    if replace and resume:
        raise ConfigError("--replace deletes the run that --resume would go on with; pass one of them")
    run = load_config(config, overrides)
    if dry_run:
        from agentrl.cli.plan import describe_plan, missing_here, resolved_yaml

        missing = "".join(f"not on this machine: {line}\n" for line in missing_here(run))
        print(f"{describe_plan(run)}\n{missing}\n{resolved_yaml(run)}", end="")
        return
    from agentrl.cli.train import train as train_locally

    existing = "replace" if replace else "resume" if resume else "error"
    _run(partial(train_locally, run, existing=existing, may_exit=True), partial(results_in, run.run_dir))


@app.command(name="eval")
def evaluate(
    config: Path,
    /,
    *overrides: Overrides,
    checkpoint: Path | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    episodes: int | None = None,
    greedy: bool = False,
    output: Path | None = None,
) -> None:
    """Run the workflow on the held-out tasks and report success, without training.

    The success rate is over the episodes that did not fail; exit status 1 if more than rollout.max_failure_rate of them did.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file set anew.
        checkpoint: HF checkpoint to serve and evaluate; the file's model.path when neither this nor --endpoint is given.
        endpoint: Base URL of any OpenAI-compatible endpoint to evaluate instead, such as http://127.0.0.1:8000/v1.
        model: Model name to ask the endpoint for.
        api_key_env: Environment variable that holds the endpoint's key; OPENAI_API_KEY by default, if that is set.
        episodes: How many episodes; engine.eval_episodes by default.
        greedy: Sample at temperature 0.
        output: Write the report as JSON to this file too.
    """
    if endpoint is not None and checkpoint is not None:
        raise ConfigError("--checkpoint and --endpoint were both given; evaluate one of them")
    if endpoint is not None and model is None:
        raise ConfigError("--endpoint needs --model, the name to ask it for")
    from agentrl.cli.evaluate import Target, evaluate_target

    run = load_config(config, overrides)
    target = Target(checkpoint=checkpoint, endpoint=endpoint, model=model, api_key_env=api_key_env)
    job = partial(evaluate_target, run, target, episodes=episodes, greedy=greedy, output=output)
    _run(job, lambda: "An evaluation that is cut short has no results.", stall_timeout_s=run.engine.stall_timeout_s)


@app.command
def serve(
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
    fault: tuple[str, ...] = (),
) -> None:
    """Serve a checkpoint with the embedded server, which speaks SGLang's HTTP protocol.

    Args:
        model: Local HF checkpoint of a Qwen2, Qwen3 or Llama architecture.
        host: Address to listen on; anything but loopback needs --api-key-env.
        port: Port to listen on; 0 picks a free one.
        device: auto, cpu, cuda or cuda:N.
        threads: CPU threads.
        max_running_requests: Sequences decoded together.
        max_context_tokens: Longest context plus output of one request.
        api_key_env: Environment variable that holds the key clients must send.
        fault: A fault of SGLang to copy, to test a client with; may be repeated, `sglang` for all of them.
    """
    from agentrl.cli.serve import serve_checkpoint

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
    )


@app.command
def sft(config: Path, output: Path, /, *overrides: Overrides) -> None:
    """Warm-start a model on conversations (the file's sft section) and write the new checkpoint.

    Args:
        config: YAML file that describes the run.
        output: Directory the new checkpoint is written to; must not exist.
        overrides: Fields of the file set anew, such as --sft.steps 500.
    """
    from agentrl.cli.sft import warm_start

    with telling(partial(results_in, output)):
        warm_start(load_config(config, overrides), output)


@app.command
def doctor(config: Path | None = None, /, *overrides: Overrides) -> None:
    """Check this machine, a run file, its servers and a round trip, and say what to fix.

    Args:
        config: YAML file that describes a run; without it only the machine is checked.
        overrides: Fields of the file set anew.
    """
    from agentrl.cli.doctor import examine

    with telling(lambda: "Nothing it tried is kept."):
        if not examine(config, overrides):
            sys.exit(1)


def load_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the run that a YAML file and the overrides describe; see `agentrl.config.load_config`."""
    from agentrl import config

    return config.load_config(path, overrides)


def _run(job: Callable[[], Awaitable[object]], results: Callable[[], str], *, stall_timeout_s: float | None = None) -> None:
    """Run an async job to its end; its own cleanup ends what it started.

    Args:
        job: an async function.
        results: says, after an interrupt, where results are.
        stall_timeout_s: seconds the job may block the event loop; None for a job that watches over itself.
    """
    import anyio

    from agentrl.watchdog.loop import run_watched

    with telling(results):
        if stall_timeout_s is None:
            anyio.run(job)
        else:
            run_watched(job, stall_timeout_s=stall_timeout_s, last_words=lambda _ending: results())


def main() -> None:
    """Run the command line."""
    guarded(app)


def guarded(command: Callable[[], object]) -> None:
    """Run a command; one of our errors becomes one message and the exit status, an interrupt status 130 (SIGTERM: 143)."""
    try:
        with sigterm_raises():
            command()
    except KeyboardInterrupt as stop:
        sys.exit(say_stopped(stop))
    except (AgentRLError, BaseExceptionGroup) as error:
        from agentrl.cli.train import first_of_ours

        ours = first_of_ours(error)
        if ours is None:
            raise
        print(f"agentrl: {ours}", file=sys.stderr)
        sys.exit(2 if isinstance(ours, ConfigError) else 1)


if __name__ == "__main__":
    main()
