"""A task with the images that an engine has built for it, or that it has under the names that the task gives."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.errors import EnvironmentFault
from agentrl_sandbox.containers.image_facts import ImageFacts
from agentrl_sandbox.containers.protocol import BuildsImages, BuiltImage
from agentrl_sandbox.harbor.dockerfile import working_directory
from agentrl_sandbox.harbor.recipe import ImageRecipe
from agentrl_sandbox.harbor.task import HarborTask, read_harbor_folder


async def read_built_task(folder: Path, engine: BuildsImages) -> HarborTask:
    """Return the task in a folder, whose images are built, with the variables and the directory that they have.

    Raises:
        ConfigError: the folder cannot be read.
        EnvironmentFault: an image cannot be built, or is one of another architecture or user.
        MissingImage: `images` names one that is not there.
    """
    task = read_harbor_folder(folder, by_engine=True)
    named = {recipe.image for recipe in _recipes(task) if recipe.image is not None}
    facts: dict[str, ImageFacts] = {}
    for name in sorted(named):
        if (found := await engine.described(name)) is not None:
            _refuse_user(found, f"{folder}: the image {name!r}")
            facts[name] = ImageFacts(env=dict(found.env), workdir=found.workdir)
    if facts:
        task = read_harbor_folder(folder, facts.get, by_engine=True)
    return await _with_images(task, engine)


def _recipes(task: HarborTask) -> list[ImageRecipe]:
    return [task.image] if task.judge is None else [task.image, task.judge.image]


async def _with_images(task: HarborTask, engine: BuildsImages) -> HarborTask:
    image = await _built(task.image, engine, task.build_timeout_s)
    judge = task.judge
    if judge is not None:
        judge = msgspec.structs.replace(judge, image=await _built(judge.image, engine, judge.build_timeout_s))
    steps = [
        msgspec.structs.replace(
            step,
            image=image,
            judge=judge if step.judge is None or judge is None else msgspec.structs.replace(step.judge, image=judge.image),
        )
        for step in task.steps
    ]
    return msgspec.structs.replace(task, image=image, judge=judge, steps=tuple(steps))


async def _built(recipe: ImageRecipe, engine: BuildsImages, timeout_s: float) -> ImageRecipe:
    if recipe.build is None:
        return recipe
    found = await engine.built_from(recipe.build.folder, timeout_s=timeout_s)
    _refuse_user(found, str(recipe.build.folder))
    return ImageRecipe(
        image=found.image,
        workdir=working_directory(found.workdir, recipe.build.workdir),
        env=dict(found.env),
        built_from=str(recipe.build.folder),
    )


def _refuse_user(image: BuiltImage, whose: str) -> None:
    if image.user not in ("", "root", "0"):
        raise EnvironmentFault(
            f"{whose}: expected an image of root, the one user of containers, got USER {image.user}; end its Dockerfile "
            "with `USER root`, or leave the task out"
        )
