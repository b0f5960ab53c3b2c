"""`agentrl init NAME`: write an agent, its tasks, its tests and its run into a new folder.

Invariant: nothing that exists is written over. What is written passes its own tests, `agentrl doctor` and a dry run, and
trains on a CPU without a network; a command that fails leaves nothing behind.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.processes.watchdog.signals import interrupt_note

_SUFFIX = ".template"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAKE_MODEL = "make_model.py"
_MODEL_S = 300.0
"""Seconds that making the tiny model may take; it imports torch."""


def init_command(folder: Path, /, *, template: str = "attempts") -> None:
    """Write a new project: an agent, its tasks, its tests, a run file and a tiny model to train at once.

    Args:
        folder: A new or empty folder; its last part names the run.
        template: What to start from: attempts.
    """
    with interrupt_note(lambda: f"{folder} may be incomplete; remove it and start again."):
        print(start_project(folder, template))


def start_project(folder: Path, template: str = "attempts") -> str:
    """Write a project into `folder`, and return what to do next.

    Raises:
        ConfigError: the folder holds something, its name cannot be one of a run, the template is unknown, or writing fails.
    """
    if template not in templates():
        raise ConfigError(f"--template {template}: there is no such template; there is {', '.join(templates())}")
    name = folder.resolve().name
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{folder}: {name!r} cannot name a run; use letters, digits, dots, dashes and underscores")
    existed = folder.exists()
    if existed and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists; name a folder that does not, or an empty one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in _template_folder(template).iterdir():
            if source.name.endswith(_SUFFIX):
                text = source.read_text(encoding="utf-8").replace("@NAME@", name)
                (folder / source.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
        _make_model(folder)
    except BaseException as error:  # also Ctrl-C
        _remove(folder, keep_folder=existed)
        if isinstance(error, OSError | ConfigError):
            raise ConfigError(f"cannot write {folder}: {error}") from error
        raise
    return _next_steps(folder)


def templates() -> list[str]:
    """Return the names of the templates, the default first."""
    names = sorted(each.name for each in _template_root().iterdir() if each.is_dir() and not each.name.startswith("_"))
    return sorted(names, key=lambda name: name != "attempts")


def _remove(folder: Path, *, keep_folder: bool) -> None:
    """Remove what was written into `folder`, which held nothing before."""
    if not keep_folder:
        shutil.rmtree(folder, ignore_errors=True)
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _template_root() -> Traversable:
    return files("agentrl.commands").joinpath("templates")


def _template_folder(name: str) -> Traversable:
    return _template_root().joinpath(name)


def _make_model(folder: Path) -> None:
    """Run the project's own script that writes its tiny model."""
    command = [sys.executable, _MAKE_MODEL]
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_MODEL_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{_MAKE_MODEL} did not end within {_MODEL_S:g} s; is the machine busy?") from error
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["(no output)"])[-1]
        raise ConfigError(f"{_MAKE_MODEL} failed: {last}")


def _next_steps(folder: Path) -> str:
    written = "\n".join(f"    {path.name}" for path in sorted(folder.iterdir()))
    steps = (
        ("pytest", "test the agent, without a model"),
        ("agentrl doctor run.yaml", "check the machine, the run file and eight episodes"),
        ("agentrl train run.yaml --dry-run", "print the plan"),
        ("agentrl train run.yaml", "train, about a minute on an idle CPU"),
    )
    commands = "\n".join(f"    {command:<34} # {what}" for command, what in steps)
    return f"Wrote {folder}/:\n{written}\n\nNext:\n    cd {folder}\n{commands}"
