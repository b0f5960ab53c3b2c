"""What of the Dockerfiles of tasks is not carried out, for the plan of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.image_facts import FactsOf
from agentrl_sandbox.harbor.recipe import ImageRecipe
from agentrl_sandbox.harbor.task import read_harbor_folder
from agentrl_sandbox.harbor.unreadable import reason_of

_SHOWN: Final = 5
"""Tasks that a refusal names."""
_MAX_CHARS: Final = 160
"""Of an instruction, which may be long."""


def remarks_on_images(
    folders: Iterable[str], has_packages: Collection[str], facts_of: FactsOf, *, builder: str = ""
) -> list[str]:
    """Return each instruction that counts as done or is left out, with the reason; the same one of many tasks once.

    Args:
        folders: of tasks.
        has_packages: images that hold what commands fetch.
        facts_of: knows what images say of themselves.
        builder: the engine that builds images from Dockerfiles; empty: none does.

    Raises:
        ConfigError: tasks need a network for their Dockerfiles, or cannot be read; the message names the first ones.
    """
    first: dict[tuple[str, str, str], str] = {}
    counts = Counter[tuple[str, str, str]]()
    refused: list[str] = []
    built: set[Path] = set()
    for folder in sorted(set(folders)):
        try:
            recipes = _settled(Path(folder), has_packages, facts_of, by_engine=bool(builder))
        except ConfigError as error:
            refused.append(str(error))
            continue
        built |= {recipe.build.folder for recipe in recipes if recipe.build is not None}
        for left in (left for recipe in recipes for left in recipe.left_out):
            key = (left.said.rpartition(" ")[2], " ".join(left.text.split()), left.why)
            counts[key] += 1
            first.setdefault(key, left.said.rpartition(": ")[0])
    if refused:
        more = f"\nand {len(refused) - _SHOWN} more tasks" if len(refused) > _SHOWN else ""
        raise ConfigError("\n".join(refused[:_SHOWN]) + more)
    remarks = [_remark(key, counts[key], where) for key, where in first.items()]
    if built:
        what = f"{len(built)} images from their Dockerfiles" if len(built) > 1 else "the image of one Dockerfile"
        remarks.insert(0, f"{builder} builds {what}, where it does not have them yet, before the first episode over each")
    return remarks


def refusal_of_folder(folder: Path, has_packages: Collection[str], facts_of: FactsOf, *, by_engine: bool = False) -> str:
    """Return why `remarks_on_images` refuses a task, in words that fit others with the same fault; empty: it does not."""
    try:
        _settled(folder, has_packages, facts_of, by_engine=by_engine)
    except ConfigError as error:
        return reason_of(error, folder)
    return ""


def _settled(folder: Path, has_packages: Collection[str], facts_of: FactsOf, *, by_engine: bool) -> list[ImageRecipe]:
    """Return the environment of a task, and that of its tests where they have one, as they are carried out or built."""
    harbor = read_harbor_folder(folder, facts_of, by_engine=by_engine)
    own = None if harbor.judge is None else harbor.judge.image
    images = [harbor.image] if own is None or own == harbor.image else [harbor.image, own]
    return [image.settled(has_packages) if image.build is None else image for image in images]


def _remark(key: tuple[str, str, str], count: int, where: str) -> str:
    name, text, why = key
    shown = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."
    place = where if count == 1 else f"{where} and {count - 1} more"
    return f"not run: {name} {shown} ({place}): {why}"
