"""`agentrl init NAME`: write an agent, its tasks, its tests and its run into a new folder.

With `--model` the run trains a pretrained model, with settings for its size; without, a tiny one is made.

Invariant: nothing that exists is written over. What is written passes its own tests, `agentrl doctor` and a dry run, and
trains on a CPU without a network; a command that fails leaves nothing behind.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from agentrl.config import ModelConfig
from agentrl.errors import ConfigError
from agentrl.plan.model_defaults import PRETRAINED, count_parameters, defaults_for, spoken
from agentrl.processes.watchdog.signals import interrupt_note

_SUFFIX = ".template"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAKE_MODEL = "make_model.py"
_PRETRAINED = "_pretrained"
"""The folder of what stands in the place of a template's files where a model is named."""
_MODEL_S = 300.0
"""Seconds that making the tiny model may take; it imports torch."""


def init_command(folder: Path, /, *, template: str = "attempts", model: str | None = None) -> None:
    """Write a new project: an agent, its tasks, its tests, a run file and a tiny model to train at once.

    Args:
        folder: A new or empty folder; its last part names the run.
        template: What to start from: attempts.
        model: A pretrained model to train in place of the tiny one: a HF checkpoint, a GGUF file, or hf://org/name. The
            run file gets settings for its size.
    """
    with interrupt_note(lambda: f"{folder} may be incomplete; remove it and start again."):
        print(start_project(folder, template, model))


def start_project(folder: Path, template: str = "attempts", model: str | None = None) -> str:
    """Write a project into `folder`, and return what to do next; it trains `model`, or a tiny one that is made.

    Raises:
        ConfigError: the folder holds something, its name cannot be one of a run, the template is unknown, the size of the
            model cannot be told, or writing fails.
    """
    if template not in templates():
        raise ConfigError(f"--template {template}: there is no such template; there is {', '.join(templates())}")
    name = folder.resolve().name
    if _NAME.fullmatch(name) is None:
        raise ConfigError(f"{folder}: {name!r} cannot name a run; use letters, digits, dots, dashes and underscores")
    existed = folder.exists()
    if existed and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists; name a folder that does not, or an empty one")
    values = {"NAME": name} | ({} if model is None else _model_values(model))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in _sources(template, is_pretrained=model is not None):
            text = re.sub("@([A-Z_]+)@", lambda found: values[found[1]], source.read_text(encoding="utf-8"))
            (folder / source.name.removesuffix(_SUFFIX)).write_text(text, encoding="utf-8")
        if model is None:
            _make_model(folder)
    except BaseException as error:  # also Ctrl-C
        _remove(folder, keep_folder=existed)
        if isinstance(error, OSError | ConfigError):
            raise ConfigError(f"cannot write {folder}: {error}") from error
        raise
    training = "about a minute on an idle CPU" if model is None else "with settings for the size of the model"
    return _next_steps(folder, training)


def _model_values(model: str) -> dict[str, str]:
    """Return what the run file of a pretrained model holds, by the model's size."""
    config = ModelConfig(path=model if model.startswith("hf://") else str(Path(model).absolute()))
    parameters = count_parameters(config)
    if parameters < PRETRAINED:
        raise ConfigError(
            f"--model {model}: {parameters} parameters are no pretrained model; leave --model out for a tiny one, or name "
            f"one of at least {spoken(PRETRAINED)}"
        )
    fits = defaults_for(parameters)
    return {
        "MODEL": json.dumps(config.path),
        "SIZE": spoken(parameters),
        "SOURCE": fits.source,
        # With a point: YAML reads 1e-05 as a text.
        "LR": f"{fits.lr:.1e}",
        "WARMUP_STEPS": str(fits.warmup_steps),
        "MINIBATCHES": str(fits.minibatches),
        "GROUP_SIZE": str(fits.group_size),
        "GROUPS_PER_STEP": str(fits.groups_per_step),
        "MAX_TOKENS": str(fits.max_tokens),
    }


def _sources(template: str, *, is_pretrained: bool) -> list[Traversable]:
    """Return the files of a template; for a pretrained model, its own in the place of some, and none that makes a model."""
    found = {each.name: each for each in _template_folder(template).iterdir() if each.name.endswith(_SUFFIX)}
    if is_pretrained:
        found |= {each.name: each for each in _template_folder(_PRETRAINED).iterdir() if each.name.endswith(_SUFFIX)}
        del found[_MAKE_MODEL + _SUFFIX]
    return [found[name] for name in sorted(found)]


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


def _next_steps(folder: Path, training: str) -> str:
    written = "\n".join(f"    {path.name}" for path in sorted(folder.iterdir()))
    steps = (
        ("pytest", "test the agent, without a model"),
        ("agentrl doctor run.yaml", "check the machine, the run file and eight episodes"),
        ("agentrl train run.yaml --dry-run", "print the plan"),
        ("agentrl train run.yaml", f"train, {training}"),
    )
    commands = "\n".join(f"    {command:<34} # {what}" for command, what in steps)
    return f"Wrote {folder}/:\n{written}\n\nNext:\n    cd {folder}\n{commands}"
