"""What surrounds the tests of a task: an environment of their own, what it gets of the agent's, and commands around it.

Invariant: nothing of the agent's reaches a place where the tests or their reward are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from agentrl_sandbox.containers.image_facts import FactsOf
from agentrl_sandbox.harbor.dockerfile import read_dockerfile
from agentrl_sandbox.harbor.recipe import ImageRecipe

PUBLISHED: Final = "/logs/artifacts"
"""Where an agent, or a command that collects, puts what the tests get without being told."""
_OF_THE_TESTS: Final = ("/tests", "/solution", "/logs/verifier", "/proc", "/sys", "/dev", "/run/agentrl")
_MAIN: Final = "main"


class Judge(msgspec.Struct, frozen=True, kw_only=True):
    """An environment that the tests of a task have for themselves."""

    image: ImageRecipe
    has_tests: bool
    """Whether the image holds the tests, as one does that is made from the folder `tests` or that is named."""
    env: dict[str, str]
    memory_mb: int | None
    storage_mb: int | None
    build_timeout_s: float
    artifacts: tuple[str, ...]
    """Paths of the agent's environment that it gets."""


class CollectCommand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that runs in the agent's container once the agent is done; whether it succeeds is its own matter."""

    command: str
    service: str = _MAIN
    timeout_sec: float = 60.0
    user: str | int | None = None


class HealthCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command that has to succeed before an agent begins, as Docker's HEALTHCHECK."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    """Seconds in which failures do not count."""
    start_interval_sec: float = 5.0
    retries: int = 3
    """Failures in a row that are one too many."""


def judge_image(
    folder: Path,
    *,
    docker_image: str | None,
    task_image: str | None,
    workdir: str | None,
    facts_of: FactsOf | None,
    by_engine: bool = False,
) -> tuple[ImageRecipe, bool]:
    """Return the image of the tests' own environment, and whether it holds the tests.

    It is the image that is named, or what `tests/Dockerfile` describes, or a new copy of the task's own.

    Raises:
        ConfigError: a Dockerfile has what cannot be honoured.
    """
    tests, environment = folder / "tests", folder / "environment"
    read = partial(read_dockerfile, workdir=workdir, facts_of=facts_of, by_engine=by_engine)
    if docker_image is not None:
        return read(tests, docker_image=docker_image), True
    if (tests / "Dockerfile").is_file():
        return read(tests, docker_image=None), True
    return read(environment, docker_image=task_image), False


def artifact_paths(artifacts: Sequence[str | Mapping[str, object]]) -> tuple[str, ...]:
    """Return the paths of a task's artifacts, with `/logs/artifacts`.

    Raises:
        ValueError: one cannot be honoured; the message says why.

    Example:
        >>> artifact_paths(["/app/out", {"source": "/srv/db.sql"}])
        ('/logs/artifacts', '/app/out', '/srv/db.sql')
    """
    paths = [PUBLISHED]
    for artifact in artifacts:
        entry = {"source": artifact} if isinstance(artifact, str) else artifact
        source, service = entry.get("source"), entry.get("service")
        if not isinstance(source, str) or not source.startswith("/") or ".." in PurePosixPath(source).parts:
            raise ValueError(f"expected an absolute path without '..' as source, got {source!r}")
        if service not in (None, _MAIN):
            raise ValueError(f"the sandbox has no service but {_MAIN}; got {service!r}")
        if entry.get("exclude"):
            raise ValueError(f"{source}: exclude is not honoured; name the paths that the tests need")
        path = PurePosixPath(source)
        for place in _OF_THE_TESTS:
            if path.is_relative_to(place) or PurePosixPath(place).is_relative_to(path):
                raise ValueError(f"{source} holds {place}, which an agent must not write; name a path beside it")
        if str(path) not in paths:
            paths.append(str(path))
    return tuple(paths)


def collect_problem(commands: Sequence[CollectCommand]) -> str:
    """Return why commands that collect cannot be honoured, or nothing."""
    for each in commands:
        if each.service != _MAIN:
            return f"the sandbox has no service but {_MAIN}; got {each.service!r}"
        if each.user not in (None, "root", 0):
            return f"the sandbox has one user, root; got {each.user!r}"
        if not 0 < each.timeout_sec <= 86_400:
            return f"expected seconds above 0, at most a day, got timeout_sec = {each.timeout_sec!r}"
    return ""


def health_problem(check: HealthCheck | None) -> str:
    """Return why a health check cannot be honoured, or nothing."""
    if check is None:
        return ""
    seconds = (check.interval_sec, check.start_interval_sec, check.start_period_sec)
    if not 0 < check.timeout_sec <= 86_400 or any(not 0 <= each <= 86_400 for each in seconds):
        return "expected seconds of at least 0, at most a day, and a timeout_sec above 0"
    return "" if check.retries >= 1 else f"expected retries of at least 1, got {check.retries}"
