"""The `agentrl` command line: `agentrl --help` lists its commands, each a file of this folder or of a companion.

Invariant: a command is imported when it is asked for, inside `run_command`, so that an interrupt during the import prints
one message too. `agentrl --help` imports none: it shows the first sentence of each command, which stands here as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, cast

from cyclopts import App

from agentrl.commands.running import run_command
from agentrl.processes.watchdog.signals import interrupt_note, threads_end_with_command
from agentrl.support.companions import Command, companion_names, load_companion

COMMANDS: Final = {
    "train": Command(
        "train:train_command", "Train a model on a workflow: start servers and trainer, run, and write runs/NAME/."
    ),
    "eval": Command("evaluate:eval_command", "Run the workflow on the held-out tasks and report success, without training."),
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
    "doctor": Command(
        "doctor:doctor_command", "Check this machine, a run file and its parts, play eight episodes, and print what to fix."
    ),
    "validate": Command(
        "validate:validate_command",
        "Check the tasks of a run without a model: references score full, empty replies do not, no prompt is there twice.",
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
"""The commands of this package by name, without the one that follows; the places are below `agentrl.commands`."""


def make_app(arguments: Sequence[str]) -> App:
    """Return the command line for `arguments`; the help of the command that they name is its own."""
    app = App(
        name="agentrl",
        help="Multi-turn agentic RL of language models. One YAML file describes a run; "
        "--section.field VALUE overrides a field.",
        suppress_keyboard_interrupt=False,  # `run_command` prints more
    )
    commands = {name: Command(f"agentrl.commands.{place}", summary) for name, (place, summary) in COMMANDS.items()}
    for companion in companion_names("agentrl.commands"):
        commands |= cast("Mapping[str, Command]", load_companion("agentrl.commands", companion))
    for name, command in commands.items():
        app.command(command.place, name=name, help=None if name in arguments else command.summary)
    app.command(download_command, name="download")
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison] - so where a shell closes it, with 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open to the end; also keeps descriptor 2 from other files
    words = sys.argv[1:] if arguments is None else arguments
    with threads_end_with_command():
        run_command(partial(make_app(words), words))


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
