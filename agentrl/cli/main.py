"""The `agentrl` command; `agentrl --help` lists what it does.

Invariant: bad input prints one message and exits with status 2; a failed run prints one message and exits with status 1.
Ctrl-C and SIGTERM end everything that the command started and print where the results are. A traceback on the terminal is
a bug. Each command imports the slow modules itself, so that an interrupt during the import prints one message too.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from agentrl.cli.running import run_job
from agentrl.cli.serving import chat_command, serve_command
from agentrl.cli.simulating import simulate_command
from agentrl.errors import AgentRLError, ConfigError
from agentrl.foreign import make_log_visible, visible
from agentrl.jobs.errors import first_agentrl_error
from agentrl.watchdog.signals import describe_results, interrupt_note, print_error, print_interrupt, sigterm_raises
from agentrl.watchdog.threads import threads_end_with_command

if TYPE_CHECKING:
    from agentrl.config import RunConfig
    from agentrl.jobs.evaluate import Target

Overrides = Annotated[str, Parameter(allow_leading_hyphen=True)]

app = App(
    name="agentrl",
    help="Multi-turn agentic RL of language models. One YAML file describes a run; --section.field VALUE overrides a field.",
    suppress_keyboard_interrupt=False,  # `run_command` prints more
)


@app.command(name="train")
def train_command(
    config: Path,
    /,
    *overrides: Overrides,
    dry_run: bool = False,
    replace: bool = False,
    resume: bool = False,
    accept_changed_tasks: bool = False,
) -> None:
    """Train a model on a workflow: start servers and trainer, run, and write runs/NAME/.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override, such as --trainer.lr 1e-5 --name second-try.
        dry_run: Print the resolved plan and start nothing; errors and what this machine lacks come last (exit status 1).
        replace: Delete an existing runs/NAME/ first; without this flag an existing one is an error.
        resume: Continue from the newest checkpoint in runs/NAME/; a complete run only prints where its summary is.
        accept_changed_tasks: With --resume, continue with tasks that are not those of the checkpoint.
    """
    if replace and resume:
        raise ConfigError("--replace deletes the run that --resume would continue; pass only one of them")
    run = _read_run(config, overrides)
    if dry_run:
        from agentrl.plan.checks import missing_here, reward_warnings
        from agentrl.plan.plan import plan_run
        from agentrl.plan.text import describe_plan, resolved_yaml

        plan = plan_run(run, resumes=resume)
        missing = missing_here(plan)
        lacks = "".join(
            [f"error: {line}\n" for line in plan.problems] + [f"not on this machine: {line}\n" for line in missing]
        )
        warnings = "".join(f"warning: {line}\n" for line in reward_warnings(plan.run))
        print(f"{describe_plan(plan)}\n\n{resolved_yaml(plan.run)}{warnings}{lacks}", end="")
        sys.exit(1 if plan.problems or missing else 0)
    from agentrl.jobs.ending import describe_interrupted_run
    from agentrl.jobs.train import train_run

    existing = "replace" if replace else "resume" if resume else "error"
    job = partial(train_run, run, existing=existing, accept_changed_tasks=accept_changed_tasks, may_exit=True)
    run_job(job, partial(describe_interrupted_run, run))


@app.command(name="eval")
def eval_command(
    config: Path,
    /,
    *overrides: Overrides,
    checkpoint: Path | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    episodes: int | None = None,
    samples: int | None = None,
    greedy: bool = False,
    output: Path | None = None,
) -> None:
    """Run the workflow on the held-out tasks and report success, without training.

    The success rate is over the episodes that did not fail. The exit status is 1 if all failed, or more than
    rollout.max_failure_rate of them.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        checkpoint: HF checkpoint to serve and evaluate; the default without --endpoint is the file's model.path.
        endpoint: Base URL of an OpenAI-compatible endpoint to evaluate instead, such as http://127.0.0.1:8000/v1.
        model: Name of the model at the endpoint.
        api_key_env: Environment variable with the endpoint's key; the default is OPENAI_API_KEY, if that is set.
        episodes: Number of episodes; the default is engine.eval_episodes, or with --samples that many of every task.
        samples: Play each task so many times, and report pass@k and the success of the majority's answer.
        greedy: Sample at temperature 0.
        output: File to write the report to, as JSON.
    """
    target = _target(checkpoint, endpoint, model, api_key_env)
    from agentrl.jobs.evaluate import evaluate_target

    run = _read_run(config, overrides)
    job = partial(evaluate_target, run, target, episodes=episodes, samples=samples, greedy=greedy, output=output)
    run_job(job, lambda: "An interrupted evaluation has no results.", stall_timeout_s=run.engine.stall_timeout_s)


app.command(serve_command, name="serve")
app.command(chat_command, name="chat")
app.command(simulate_command, name="simulate")


@app.command(name="sft")
def sft_command(config: Path, output: Path, /, *overrides: Overrides) -> None:
    """Warm-start a model on conversations (the file's sft section) and write the new checkpoint.

    Args:
        config: YAML file that describes the run.
        output: Directory for the new checkpoint; it must not exist.
        overrides: Fields of the file to override, such as --sft.steps 500.
    """
    from agentrl.jobs.sft import warm_start

    with interrupt_note(partial(describe_results, output)):
        warm_start(_read_run(config, overrides), output)


@app.command(name="view")
def view_command(
    run: Path,
    other: Path | None = None,
    /,
    *,
    port: int = 0,
    open: bool = True,
    html: Path | None = None,
    episode: str | None = None,
) -> None:
    """Show a run in the browser, live or ended: curves, who waits for whom, episodes as conversations and as tokens.

    Args:
        run: Directory of the run, such as runs/NAME.
        other: Directory of another run, to compare the two: curves over each other, fields that differ, tasks of both.
        port: Port to listen on at 127.0.0.1; 0 picks a free one.
        open: Open the page in the browser of this machine.
        html: Write one episode to this file instead, which opens without a server.
        episode: The episode to show first, or to write with --html; there the default is the best of the newest step.
    """
    from agentrl.view.command import view_run

    if other is not None and html is not None:
        raise ConfigError("--html writes an episode of one run; leave the second run out")
    runs = [run] if other is None else [run, other]
    view_run(runs, port=port, opens_browser=open, html=html, episode_id=episode)


@app.command(name="diff")
def diff_command(left: Path, right: Path, /, *, all: bool = False) -> None:
    """Compare two runs: the fields of their run files that differ, final figures, and tasks whose success changed.

    Args:
        left: Directory of a run, such as runs/NAME.
        right: Directory of another run.
        all: Print every figure and every task, instead of those that matter most.
    """
    from agentrl.cli.comparing import describe_difference

    print(describe_difference(left, right, every=all))


@app.command(name="doctor")
def doctor_command(config: Path | None = None, /, *overrides: Overrides) -> None:
    """Check this machine, a run file and its parts, play one episode, and print what to fix.

    Args:
        config: YAML file that describes a run; without it the command checks the machine only.
        overrides: Fields of the file to override.
    """
    from agentrl.cli.check.doctor import run_checks

    with interrupt_note(lambda: "The checks leave nothing behind."):
        if not run_checks(config, overrides):
            sys.exit(1)


@app.command(name="validate")
def validate_command(config: Path, /, *overrides: Overrides, limit: int | None = None) -> None:
    """Check the tasks of a run without a model: references score full, empty replies do not, no prompt is there twice.

    The exit status is 1 if something is to be fixed.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        limit: Check only so many tasks of each set; by default all, and 100 of a set that never ends.
    """
    from agentrl.cli.check.validate import TaskValidation, print_validation

    run = _read_run(config, overrides)
    validation = TaskValidation(run, limit=limit)

    async def check() -> None:
        if not print_validation(await validation.check()):
            sys.exit(1)

    run_job(check, lambda: "An interrupted check has no results.", stall_timeout_s=run.engine.stall_timeout_s)


@app.command(name="download")
def download_command(name: str, /) -> None:
    """Download a model or a data set from the Hugging Face hub into its local cache, where runs find it.

    Args:
        name: hf://org/model, or hf://datasets/org/name/file for a data set; @revision after the name is optional.
    """
    from agentrl.config.names import download

    with interrupt_note(lambda: "What is complete stays in the cache; run the command again to continue."):
        print(download(name))


@app.command(name="record")
def record_command(
    config: Path,
    /,
    *overrides: Overrides,
    output: Path,
    task: str | None = None,
    episodes: int | None = None,
    checkpoint: Path | None = None,
    endpoint: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
) -> None:
    """Run episodes and write each as a cassette, which `agentrl replay` plays without a model.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        output: Directory for the cassettes; a file of the same name is replaced.
        task: Id of the one task to record; the default is the held-out tasks, or else the training tasks, in order.
        episodes: Number of episodes; one by default.
        checkpoint: HF checkpoint to serve; the default without --endpoint is the file's model.path.
        endpoint: Base URL of an OpenAI-compatible endpoint to ask instead; its cassettes hold no token ids.
        model: Name of the model at the endpoint.
        api_key_env: Environment variable with the endpoint's key; the default is OPENAI_API_KEY, if that is set.
    """
    target = _target(checkpoint, endpoint, model, api_key_env)
    from agentrl.jobs.record import record_cassettes

    run = _read_run(config, overrides)
    job = partial(record_cassettes, run, output, target, task=task, episodes=episodes)
    run_job(job, lambda: f"The cassettes so far are in {output}.", stall_timeout_s=run.engine.stall_timeout_s)


@app.command(name="replay")
def replay_command(
    *cassettes: Path, workflow: str | None = None, workflow_args: str | None = None, live_tools: bool = False
) -> None:
    """Run recorded episodes again without a model, and compare them with their records, byte by byte.

    The exit status is 1 if an episode is different.

    Args:
        cassettes: Files that `agentrl record` wrote, or directories of them.
        workflow: Workflow to run, as module:Name; the default is the one of each cassette.
        workflow_args: Its arguments, as JSON; the default is those of the cassette.
        live_tools: Run the tools again instead of using their recorded replies.
    """
    from agentrl.jobs.files import parse_json_object
    from agentrl.jobs.replay import replay_cassettes

    args = None if workflow_args is None else parse_json_object(workflow_args, "--workflow-args")

    async def replay() -> None:
        if not await replay_cassettes(cassettes, workflow=workflow, workflow_args=args, live_tools=live_tools):
            sys.exit(1)

    run_job(replay, lambda: "A replay leaves nothing behind.")


@app.command(name="rescore")
def rescore_command(
    run: Path,
    /,
    *,
    workflow: str | None = None,
    workflow_args: str | None = None,
    step: int | None = None,
    limit: int | None = None,
    live_tools: bool = False,
    output: Path | None = None,
) -> None:
    """Compute the rewards of a run's stored episodes again, without a model, and print what changed.

    Args:
        run: Directory of the run, such as runs/demo; nothing in it is changed.
        workflow: Workflow to run, as module:Name; the default is the one of the run.
        workflow_args: Its arguments, as JSON; the default is those of the run.
        step: Only the episodes that ended before this training step was complete.
        limit: At most so many episodes.
        live_tools: Run the tools again instead of using their stored replies.
        output: File to write one JSON line an episode to.
    """
    from agentrl.jobs.files import parse_json_object
    from agentrl.jobs.rescore import rescore_run

    args = None if workflow_args is None else parse_json_object(workflow_args, "--workflow-args")
    job = partial(rescore_run, run, workflow=workflow, workflow_args=args)
    run_job(
        partial(job, step=step, limit=limit, live_tools=live_tools, output=output),
        lambda: "An interrupted rescoring has no results.",
    )


envs_app = App(name="envs", help="List the installed environments, or play one.")
app.command(envs_app)


@envs_app.default
def list_environments() -> None:
    """List the installed environments, each with what it is and what it needs."""
    from agentrl.cli.environments import describe_environments

    print(describe_environments())


@envs_app.command(name="play")
def play_command(name: str, /, *arguments: str, task: str = "{}", seed: int = 0) -> None:
    """Play one episode in the terminal: a line is an answer, `/call TOOL {...}` calls a tool, Ctrl-D leaves.

    Args:
        name: An installed environment, or module:Name.
        arguments: Arguments of the environment as name=value, such as id=FrozenLake-v1.
        task: Fields of the task, as JSON.
        seed: Seed of the environment.
    """
    from agentrl.cli.environments import parse_named_values, play_environment
    from agentrl.jobs.files import parse_json_object

    run_job(
        partial(play_environment, name, parse_named_values(arguments), parse_json_object(task, "--task"), seed=seed),
        lambda: "A played episode leaves nothing behind.",
    )


@app.command(name="init")
def init_command(folder: Path, /, *, template: str = "attempts") -> None:
    """Write a new project: an agent, its tasks, its tests, a run file and a tiny model to train at once.

    Args:
        folder: A new or empty folder; its last part names the run.
        template: What to start from: attempts.
    """
    from agentrl.cli.start.init import start_project

    with interrupt_note(lambda: f"{folder} may be incomplete; remove it and start again."):
        print(start_project(folder, template))


@app.command(name="explain")
def explain_command(name: str, /) -> None:
    """Print what a field of the run file or a metric means, its type, its unit and its default; for a section, its fields.

    Args:
        name: A field such as trainer.lr, its last part, a section such as trainer, or a key of metrics.jsonl.
    """
    from agentrl.cli.reference import explain_name

    print(explain_name(name))


@app.command(name="config")
def config_command(config: Path | None = None, /, *overrides: Overrides, all: bool = False) -> None:
    """List every field of a run file with its default; with a run file, the values that it gives.

    Args:
        config: YAML file that describes a run; without it the command lists the defaults.
        overrides: Fields of the file to override.
        all: With a run file, list also the fields that it leaves at their defaults.
    """
    from agentrl.cli.reference import describe_fields

    print(describe_fields(None if config is None else _read_run(config, overrides), every=all))


def _target(checkpoint: Path | None, endpoint: str | None, model: str | None, api_key_env: str | None) -> Target:
    if endpoint is not None and checkpoint is not None:
        raise ConfigError("--checkpoint and --endpoint exclude each other; pass only one of them")
    if endpoint is not None and model is None:
        raise ConfigError("--endpoint needs --model, the name of the model at the endpoint")
    from agentrl.jobs.evaluate import Target

    return Target(checkpoint=checkpoint, endpoint=endpoint, model=model, api_key_env=api_key_env)


def _read_run(path: Path, overrides: Sequence[str]) -> RunConfig:
    from agentrl.config import load_config

    return load_config(path, overrides)


def main() -> None:
    """Run the command line."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - so where a shell closes it, with 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open to the end; also keeps descriptor 2 from other files
    with threads_end_with_command():
        run_command(app)


def _reader_left() -> bool:
    """Return whether the reader of standard output has what it wanted, as in `agentrl config | head`."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors are reported in any case
    return bool(output.poll(0))


def run_command(command: Callable[[], object]) -> None:
    """Run a command and exit: agentrl's errors become one message and status 2 or 1, Ctrl-C 130 and SIGTERM 143."""
    make_log_visible()
    try:
        with sigterm_raises():
            command()
    except KeyboardInterrupt as interrupt:
        sys.exit(print_interrupt(interrupt))
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (AgentRLError, BaseExceptionGroup) as error:
        found = first_agentrl_error(error)
        if found is None:
            raise
        print_error(visible(f"agentrl: {found}"))
        sys.exit(2 if isinstance(found, ConfigError) else 1)


if __name__ == "__main__":
    main()
