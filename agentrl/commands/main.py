"""The `agentrl` command line: `agentrl --help` lists its commands, each of which is one file of this folder.

Invariant: a command is imported when it is asked for, inside `run_command`, so that an interrupt during the import prints
one message too. `agentrl --help` imports none: it shows the first sentence of each command, which stands here as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from cyclopts import App, Parameter

from agentrl.commands.running import Overrides, load_run, run_command
from agentrl.errors import ConfigError
from agentrl.watchdog.signals import interrupt_note, threads_end_with_command


class Command(NamedTuple):
    """A command that is not imported yet."""

    place: str
    """`module:function`, below `agentrl.commands`."""
    summary: str
    """The first sentence of its help."""


COMMANDS: Final = {
    "train": Command(
        "train:train_command", "Train a model on a workflow: start servers and trainer, run, and write runs/NAME/."
    ),
    "eval": Command("evaluate:eval_command", "Run the workflow on the held-out tasks and report success, without training."),
    "serve": Command(
        "serve:serve_command",
        "Serve a checkpoint with the embedded server: SGLang's HTTP protocol, and the OpenAI API under /v1.",
    ),
    "sandbox-host": Command(
        "hosts.sandbox_host:sandbox_host_command",
        "Give containers of this machine to runs on others, which name it under workflow_args.containers.",
    ),
    "online": Command(
        "online.online_command:online_command",
        "Serve the policy to real clients over HTTP, and train it on their feedback while it serves.",
    ),
    "chat": Command(
        "chat:chat_command",
        "Talk with a checkpoint in the terminal; /reset starts again, /save FILE writes the conversation, Ctrl-D leaves.",
    ),
    "sft": Command(
        "models.sft:sft_command",
        "Warm-start a model on conversations (the file's sft section) and write a checkpoint.",
    ),
    "merge": Command(
        "models.merge:merge_command",
        "Write a whole Hugging Face model from the adapter of a run, a checkpoint, or a directory of PEFT.",
    ),
    "diff": Command(
        "diff:diff_command",
        "Compare two runs: the fields of their run files that differ, final figures, and tasks whose success changed.",
    ),
    "audit": Command(
        "audit:audit_command",
        "Prove from a run's files that the trained tokens are those that were sent and sampled; status 1 where one is not.",
    ),
    "doctor": Command(
        "doctor:doctor_command", "Check this machine, a run file and its parts, play eight episodes, and print what to fix."
    ),
    "validate": Command(
        "validate:validate_command",
        "Check the tasks of a run without a model: references score full, empty replies do not, no prompt is there twice.",
    ),
    "record": Command(
        "record:record_command", "Run episodes and write each as a cassette, which `agentrl replay` plays without a model."
    ),
    "replay": Command(
        "replay:replay_command",
        "Run recorded episodes again without a model, and compare them with their records, byte by byte.",
    ),
    "rescore": Command(
        "rescore:rescore_command",
        "Compute the rewards of a run's stored episodes again, without a model, and print what changed.",
    ),
    "export": Command(
        "exchange.export_command:export_command",
        "Write the stored episodes of a run in the format of other programs: one ATIF document an episode.",
    ),
    "init": Command(
        "init:init_command",
        "Write a new project: an agent, its tasks, its tests, a run file and a tiny model to train at once.",
    ),
    "explain": Command(
        "explain:explain_command",
        "Print what a field of the run file or a metric means, its type, its unit and its default; "
        "for a section, its fields.",
    ),
    "config": Command(
        "explain:config_command",
        "List every field of a run file with its default; with a run file, the values that it gives.",
    ),
    "envs": Command("envs:envs_app", "List the installed environments, or play one."),
}
"""The commands by name, without those that are one call, which follow."""


def make_app(arguments: Sequence[str]) -> App:
    """Return the command line for `arguments`; the help of the command that they name is its own."""
    app = App(
        name="agentrl",
        help="Multi-turn agentic RL of language models. One YAML file describes a run; "
        "--section.field VALUE overrides a field.",
        suppress_keyboard_interrupt=False,  # `run_command` prints more
    )
    for name, command in COMMANDS.items():
        app.command(f"agentrl.commands.{command.place}", name=name, help=None if name in arguments else command.summary)
    for name, function in (("simulate", simulate_command), ("view", view_command), ("download", download_command)):
        app.command(function, name=name)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - so where a shell closes it, with 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open to the end; also keeps descriptor 2 from other files
    given = sys.argv[1:] if arguments is None else arguments
    with threads_end_with_command():
        run_command(partial(make_app(given), given))


def simulate_command(
    config: Path,
    /,
    *overrides: Overrides,
    gpus: int | None = None,
    split: str | None = None,
    fitted_from: Annotated[Path | None, Parameter(name="--from")] = None,
    gpu: str = "h100",
    output_tokens: int | None = None,
    steps: int = 24,
    json: bool = False,
) -> None:
    """Predict step time, utilization and staleness of a run on a cluster, and what to change, without the cluster.

    Args:
        config: YAML file that describes the run.
        overrides: Fields of the file to override.
        gpus: GPUs to split between trainer and servers; the default is the split of the file.
        split: Play only this split: GPUs that serve to GPUs that train, such as 3:1.
        fitted_from: Directory of a finished run whose speeds and episodes are used; without it, the defaults of --gpu.
        gpu: The GPU whose data sheet gives the defaults: a100, h100, h200, b200 or l40s.
        output_tokens: Mean output tokens of an episode, without --from; the default is a third of what the file allows.
        steps: Training steps to play.
        json: Print JSON instead of a table.
    """
    from agentrl.files import json_text
    from agentrl.plan.simulate import SimulationOrder, describe_simulation, parse_ratio, simulate_file

    order = SimulationOrder(
        gpus=gpus,
        ratio=None if split is None else parse_ratio(split),
        fitted_from=fitted_from,
        gpu=gpu,
        output_tokens=output_tokens,
        steps=steps,
    )
    with interrupt_note(lambda: "A simulation leaves nothing behind."):
        report = simulate_file(load_run(config, overrides), order)
    print(json_text(report.as_json()) if json else describe_simulation(report))


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
        run: Directory of the run, such as runs/NAME; or a file, or folder, of ATIF trajectories of other programs.
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


def download_command(name: str, /) -> None:
    """Download a model or a data set from the Hugging Face hub into its local cache, where runs find it.

    Args:
        name: hf://org/model, or hf://datasets/org/name/file for a data set; @revision after the name is optional.
    """
    from agentrl.config.names import download

    with interrupt_note(lambda: "What is complete stays in the cache; run the command again to continue."):
        print(download(name))


if __name__ == "__main__":
    main()
