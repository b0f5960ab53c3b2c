"""What a Dockerfile of a task says, as far as a sandbox without Docker and without a network can do it.

Honoured, in the order of the file: FROM one image for this machine's platform, ARG, ENV, WORKDIR, USER root, SHELL, COPY and
ADD of files of the folder, VOLUME, RUN. Whatever else would change what the container holds is refused by file and line.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError
from agentrl_sandbox.containers.image_facts import FactsOf, ImageFacts
from agentrl_sandbox.containers.protocol import CONTAINER_VARIABLES
from agentrl_sandbox.harbor.copying import FolderCopies, MissingFileError, absolute, refuse_archives
from agentrl_sandbox.harbor.instructions import HereDocument, Instruction, read_instructions, words_in_list
from agentrl_sandbox.harbor.links import refuse_link_out, refuse_links_out
from agentrl_sandbox.harbor.places import Places
from agentrl_sandbox.harbor.recipe import CopyStep, EngineBuild, ImageRecipe, LeftOut, RunStep, Step
from agentrl_sandbox.harbor.running import read_run
from agentrl_sandbox.harbor.words import replaced, replaced_in_text, split_words

_WITHOUT_EFFECT: Final = frozenset(
    {"CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "ONBUILD"}
)
"""They describe how a container is started or named, and agentrl starts it itself."""
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION: Final = re.compile(r"--([a-z]+)(?:=(\S*))?(?:\s+|$)")
_ROOT: Final = ("root", "0")
_SHELL: Final = ("/bin/sh", "-c")
DEFAULT_WORKDIR: Final = "/app"


_PATH: Final = {"PATH": CONTAINER_VARIABLES["PATH"]}
"""Of an image of which only the files are known."""


def read_dockerfile(
    folder: Path,
    *,
    docker_image: str | None,
    workdir: str | None,
    facts_of: FactsOf | None = None,
    by_engine: bool = False,
) -> ImageRecipe:
    """Return what the folder `environment` of a task describes.

    It begins with the variables and the directory of the image, where `facts_of` knows them. With `docker_image` the
    Dockerfile's RUNs, and what it copies from elsewhere, count as done in that image. With `by_engine` and without
    `docker_image` an engine builds the image, which it alone reads the Dockerfile for.

    Raises:
        ConfigError: an instruction cannot be honoured; the message names file and line.
    """
    file = folder / "Dockerfile"
    if by_engine and docker_image is None and file.is_file():
        return _left_to_engine(folder, workdir)
    reading = _RecipeReading(folder, docker_image, facts_of or (lambda _: None))
    if file.is_file():
        refuse_link_out(folder, folder.parent)
        refuse_link_out(file, folder)
        for instruction in read_instructions(file):
            reading.follow(instruction)
        if reading.image is None:
            raise ConfigError(f"{file}: expected FROM and an image, got none; begin with one, such as FROM debian:12")
    place = working_directory(reading.here, workdir)
    reading.places.make_folder(place, f"{file}: the working directory")
    return ImageRecipe(
        image=reading.image,
        workdir=place,
        env=reading.env,
        steps=tuple(reading.steps),
        left_out=tuple(reading.left_out),
    )


def working_directory(of_image: str, of_task: str | None) -> str:
    """Return the directory in which an agent and its tests begin."""
    return absolute(of_image, of_task) if of_task else of_image if of_image != "/" else DEFAULT_WORKDIR


def _left_to_engine(folder: Path, workdir: str | None) -> ImageRecipe:
    refuse_link_out(folder, folder.parent)
    refuse_links_out(folder, folder)
    build = EngineBuild(folder=folder, workdir=workdir)
    return ImageRecipe(image=None, workdir=working_directory("/", workdir), env={}, build=build)


class _RecipeReading:
    """Follows the instructions of one Dockerfile in their order."""

    def __init__(self, folder: Path, docker_image: str | None, facts_of: FactsOf) -> None:
        self._folder, self._docker_image, self._facts_of = folder, docker_image, facts_of
        self.image = docker_image
        self._global: dict[str, str] = _platform_variables()
        """Of each ARG before FROM."""
        self._stage: str | None = None
        """The name of the stage; None: FROM has not come yet."""
        self._begin(docker_image)

    def _begin(self, image: str | None) -> None:
        """Begin with an image as it is."""
        facts = (None if image is None else self._facts_of(image)) or ImageFacts()
        self.here, self.env = facts.workdir, dict(facts.env)
        self.steps: list[Step] = []
        self.left_out: list[LeftOut] = []
        self._args: dict[str, str] = {}
        self._shell = _SHELL
        self.places = Places()
        self._copies = FolderCopies(self._folder, self.places)

    @property
    def _values(self) -> dict[str, str]:
        """The variables that an instruction sees."""
        return {**self._global} if self._stage is None else {**_PATH, **self._args, **self.env}

    def follow(self, instruction: Instruction) -> None:
        """Do what one instruction says, or refuse it."""
        name, said = instruction.name, instruction.said
        if self._stage is None and name not in ("FROM", "ARG"):
            raise ConfigError(f"{said}: expected FROM first, got {instruction.rest!r}; begin with an image")
        do = {
            "FROM": self._from,
            "ARG": self._arg,
            "ENV": self._env,
            "WORKDIR": self._workdir,
            "COPY": self._copy,
            "ADD": self._copy,
            "RUN": self._run,
            "USER": self._user,
            "SHELL": self._set_shell,
            "VOLUME": self._volume,
        }.get(name)
        if do is not None:
            do(instruction)
        elif name not in _WITHOUT_EFFECT:
            raise ConfigError(
                f"{said}: this is no instruction that the sandbox knows; correct it (a here-document's name stands "
                "right behind `<<`), or leave the task out"
            )

    def _from(self, instruction: Instruction) -> None:
        said = instruction.said
        words = self._words(instruction)
        if words and words[0].startswith("--platform="):
            self._check_platform(words.pop(0).partition("=")[2], said)
        is_named = len(words) == 3 and words[1].upper() == "AS"
        if not words or words[0].startswith("--") or not words[0] or not (len(words) == 1 or is_named):
            raise ConfigError(f"{said}: expected one image, got {instruction.rest!r}")
        image, earlier = words[0], self._stage
        if earlier is not None and image.lower() != earlier and self._docker_image is None:
            raise ConfigError(
                f"{said}: a build of several stages needs Docker; set environment.docker_image to its result, or begin "
                "with one image"
            )
        self._stage = words[2].lower() if is_named else ""
        if earlier is not None and image.lower() == earlier:
            self._args = {}
            return
        if self._docker_image is None:
            if image == "scratch":
                raise ConfigError(f"{said}: expected an image with files, got scratch; name one that has bash")
            self.image = image
        self._begin(self.image)

    def _check_platform(self, asked: str, said: str) -> None:
        own = self._global["TARGETPLATFORM"]
        if asked.removesuffix("/v8") != own and self._docker_image is None:
            raise ConfigError(f"{said}: expected the platform of this machine, {own}, got {asked}; leave the task out")

    def _arg(self, instruction: Instruction) -> None:
        for word in self._raw_words(instruction):
            name, equals, value = word.partition("=")
            self._check_name(name, instruction)
            target = self._global if self._stage is None else self._args
            if equals:
                target[name] = self._replaced(value, instruction)
            elif self._stage is not None and name in self._global:
                target[name] = self._global[name]

    def _env(self, instruction: Instruction) -> None:
        words = self._raw_words(instruction)
        if not words:
            raise ConfigError(f"{instruction.said}: expected NAME=value, got nothing")
        if "=" not in words[0]:
            name, *rest = instruction.rest.split(maxsplit=1)
            words = [f"{name}={rest[0].rstrip()}" if rest else name]
        # All words see the variables as they were before the instruction.
        found: dict[str, str] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise ConfigError(f"{instruction.said}: expected NAME=value, got {instruction.rest!r}")
            self._check_name(name, instruction)
            found[name] = self._replaced(value, instruction)
        self.env |= found

    def _check_name(self, name: str, instruction: Instruction) -> None:
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{instruction.said}: expected NAME=value, got {instruction.rest!r}")

    def _workdir(self, instruction: Instruction) -> None:
        place = self._replaced(instruction.rest, instruction)
        if not place:
            raise ConfigError(f"{instruction.said}: expected one directory, got {instruction.rest!r}")
        self.here = absolute(self.here, place)
        self._make_folders([self.here], instruction.said)

    def _volume(self, instruction: Instruction) -> None:
        words = words_in_list(instruction.rest) or self._words(instruction)
        self._make_folders([absolute("/", word) for word in words], instruction.said)

    def _make_folders(self, folders: list[str], said: str) -> None:
        for folder in folders:
            self.places.make_folder(folder, said)
        self.steps.append(CopyStep(said=said, folders=tuple(folders)))

    def _copy(self, instruction: Instruction) -> None:
        said = instruction.said
        options, rest = _options(instruction.rest)
        options = {name: self._replaced(value, instruction) for name, value in options.items()}
        words = words_in_list(rest)
        words = words or [self._replaced(word, instruction) for word in self._split(rest, instruction)]
        documents: dict[str, tuple[HereDocument, str]] = {}
        for document in instruction.documents:
            text = document.text
            if not document.is_literal:
                text = self._replaced(text, instruction, replaced_in_text)
            documents[self._replaced(document.written, instruction)] = (document, text)
        fetched = f"--from={options['from']}" if "from" in options else next((w for w in words[:-1] if "://" in w), "")
        if fetched:
            self._fetch(instruction, fetched)
            return
        try:
            step = self._copies.step(words, options, documents, self.here, said)
        except MissingFileError:
            if self._docker_image is None:
                raise
            self._leave_out(instruction)
            return
        if instruction.name == "ADD":
            refuse_archives(step)
        self.steps.append(step)

    def _fetch(self, instruction: Instruction, fetched: str) -> None:
        """Take note of files that come from a network, or from an image."""
        if self._docker_image is not None:
            self._leave_out(instruction)
            return
        said, text = instruction.said, instruction.rest
        self.steps.append(RunStep(said=said, text=text, argv=(), directory=self.here, environment={}, network=fetched))

    def _run(self, instruction: Instruction) -> None:
        if self._docker_image is not None:
            self._leave_out(instruction)
            return
        options, rest = _options(instruction.rest, repeated=("mount",))
        variables = {**self._args, **self.env}
        step = read_run(
            instruction,
            rest,
            options,
            shell=self._shell,
            directory=self.here,
            environment=variables,
            words=words_in_list(rest),
        )
        self.steps.append(step)
        self.places.forget_files()

    def _user(self, instruction: Instruction) -> None:
        user = self._replaced(instruction.rest, instruction)
        if user.partition(":")[0] in _ROOT:
            return
        if self._docker_image is None:
            raise ConfigError(
                f"{instruction.said}: expected root, the one user of the sandbox, got {user!r}; take the instruction out"
            )
        why = "everything runs as root, the one user of the sandbox"
        self.left_out.append(LeftOut(said=instruction.said, text=instruction.rest, why=why))

    def _set_shell(self, instruction: Instruction) -> None:
        words = words_in_list(instruction.rest)
        if not words:
            raise ConfigError(f'{instruction.said}: expected a list such as ["/bin/bash", "-c"], got {instruction.rest!r}')
        self._shell = tuple(words)

    def _leave_out(self, instruction: Instruction) -> None:
        why = f"the image {self.image!r} counts as having it"
        self.left_out.append(LeftOut(said=instruction.said, text=instruction.rest, why=why))

    def _words(self, instruction: Instruction) -> list[str]:
        return [self._replaced(word, instruction) for word in self._raw_words(instruction)]

    def _raw_words(self, instruction: Instruction) -> list[str]:
        return self._split(instruction.rest, instruction)

    def _split(self, text: str, instruction: Instruction) -> list[str]:
        try:
            return split_words(text, escape=instruction.escape)
        except ValueError as error:
            raise ConfigError(f"{instruction.said}: {error} in {instruction.rest!r}") from None

    def _replaced(self, text: str, instruction: Instruction, how: Callable[..., str] = replaced) -> str:
        try:
            return how(text, self._values, escape=instruction.escape)
        except ValueError as error:
            raise ConfigError(f"{instruction.said}: {error} in {instruction.rest!r}") from None


def _options(text: str, *, repeated: tuple[str, ...] = ()) -> tuple[dict[str, str], str]:
    """Return the options at the beginning of a text, such as `--chmod=755`, and the rest; `repeated` ones by lines."""
    found: dict[str, str] = {}
    while (match := _OPTION.match(text)) is not None:
        name, value = match[1], match[2] or ""
        found[name] = f"{found[name]}\n{value}" if name in found and name in repeated else value
        text = text[match.end() :]
    return found, text


def _platform_variables() -> dict[str, str]:
    machine = platform.machine().lower()
    own = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    variables = {"PLATFORM": f"linux/{own}", "OS": "linux", "ARCH": own}
    return {f"{part}{name}": value for part in ("TARGET", "BUILD") for name, value in variables.items()}
