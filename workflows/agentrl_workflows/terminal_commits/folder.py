"""The task folder for two commits: what the agent, the tests and the oracle get."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final, Literal

from agentrl.errors import ConfigError
from agentrl_workflows.terminal_commits.commits import Commit, CommitFile, History
from agentrl_workflows.terminal_commits.suite import SETTINGS, TESTS, fits

_PACKAGES: Final = "/opt/packages"
_SOLVE: Final = "#!/bin/bash\nset -e\ncd /app\ngit apply --whitespace=nowarn /solution/sources.patch\n"
_TEST: Final = "#!/bin/bash\nexec python3 -I /tests/check.py {mode}\n"
_SHOWN: Final = 20
Runner = Literal["pytest", "unittest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What the two commits do not say."""

    runner: Runner = "unittest"
    packages: Path | None = None
    """Folder of Python packages that project and tests import, such as `pip install --target` makes; None: none."""
    tests: tuple[str, ...] = TESTS
    """Patterns of the paths of tests."""
    paths: tuple[str, ...] = ("src", ".")
    """Folders of the project from which Python imports."""
    image: str = "debian:12"
    instruction: str | None = None
    """None: the messages of the commits, with the names of the tests."""
    seconds: float = 120.0
    """That the tests have."""
    feedback: bool = False
    """Whether the task offers the share of its tests that pass as feedback after each turn."""


@dataclass(frozen=True, slots=True)
class CommitTask:
    """A task of two commits."""

    history: History
    before: Commit
    after: Commit
    options: TaskOptions

    def sources(self) -> list[str]:
        """Return the paths that the oracle changes."""
        both = sorted({*self.before.files, *self.after.files})
        changed = [path for path in both if self.before.files.get(path) != self.after.files.get(path)]
        return [path for path in changed if not fits(path, self.options.tests)]

    def suite(self) -> dict[str, CommitFile]:
        """Return the tests of the second commit, and what it tells a test runner."""
        return {path: file for path, file in self.after.files.items() if fits(path, self.options.tests) or path in SETTINGS}

    def test_files(self) -> list[str]:
        """Return the paths of files with tests."""
        names = [path for path in self.suite() if path.endswith(".py") and fits(path, self.options.tests)]
        found = [path for path in names if path.rpartition("/")[2].startswith("test") or path.endswith("_test.py")]
        if not found:
            raise ConfigError(f"{self.history.folder}: {self.after.name}: no test file; name the paths of tests by --tests")
        return sorted(found)

    def write(self, folder: Path, required: Mapping[str, str]) -> None:
        """Write the folder; `required` has the tests that must pass, and what each did before: `failed` or `passed`.

        Without any it writes a folder whose tests write down what became of each, instead of a reward.
        """
        options = self.options
        files: dict[str, CommitFile] = {"task.toml": _plain_file(self._settings(required))}
        files["instruction.md"] = _plain_file(options.instruction or self._instruction(required))
        files |= {f"environment/app/{path}": file for path, file in self.before.files.items()}
        packages = _folder_files(options.packages) if options.packages is not None else {}
        files |= {f"{part}/packages/{path}": file for part in ("environment", "tests") for path, file in packages.items()}
        files["environment/Dockerfile"] = _plain_file(self._dockerfile(bool(packages)))
        files |= {f"tests/suite/{path}": file for path, file in self.suite().items()}
        files["tests/plan.json"] = _plain_file(json.dumps(self._plan(required), indent=1, sort_keys=True) + "\n")
        files["tests/test.sh"] = _script(_TEST.format(mode="all" if required else "survey"))
        if required and options.feedback:
            files["tests/feedback.sh"] = _script(_TEST.format(mode="share"))
        files["tests/check.py"], files["tests/run_suite.py"] = (
            _plain_file(_check_program()),
            _plain_file(_module_text("run_suite")),
        )
        files["solution/solve.sh"] = _script(_SOLVE)
        files["solution/sources.patch"] = CommitFile(self.history.patch(self.before, self.after, self.sources()), False)
        for path, file in files.items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.data)
            place.chmod(0o755 if file.can_run else 0o644)

    def _plan(self, required: Mapping[str, str]) -> dict[str, object]:
        options = self.options
        return {
            "runner": options.runner,
            "files": self.test_files(),
            "tests": options.tests,
            "settings": [name for name in SETTINGS if name in self.after.files],
            "paths": options.paths,
            "seconds": options.seconds,
            "required": sorted(required),
        }

    def _dockerfile(self, has_packages: bool) -> str:
        paths = [*([_PACKAGES] if has_packages else []), *(f"/app/{path}".removesuffix("/.") for path in self.options.paths)]
        lines = [f"FROM {self.options.image}", "WORKDIR /app", f"ENV PYTHONPATH={':'.join(paths)}", "COPY app /app"]
        return "\n".join([*lines, *([f"COPY packages {_PACKAGES}"] if has_packages else []), ""])

    def _instruction(self, required: Mapping[str, str]) -> str:
        failed = sorted(name for name, outcome in required.items() if outcome != "passed")
        shown = [f"- {name}" for name in failed[:_SHOWN]]
        rest = [f"- and {len(failed) - _SHOWN} more"] if len(failed) > _SHOWN else []
        said = "\n".join(f"> {line}".rstrip() for line in self.history.messages(self.before, self.after).splitlines())
        return (
            "The project in /app needs a change of its sources. Its developers describe the change so:\n\n"
            f"{said}\n\nThe following tests fail now, or are not there yet, and have to pass. The tests that pass now\n"
            "have to go on passing. You need not write tests.\n\n" + "\n".join([*shown, *rest, ""])
        )

    def _settings(self, required: Mapping[str, str]) -> str:
        options = self.options
        fixed = sum(outcome != "passed" for outcome in required.values())
        return (
            'schema_version = "1.1"\n\n[metadata]\ncategory = "repository"\n'
            f"before = {json.dumps(self.before.name)}\nafter = {json.dumps(self.after.name)}\n"
            f"tests_to_fix = {fixed}\ntests_to_keep = {len(required) - fixed}\n\n"
            f"[verifier]\ntimeout_sec = {options.seconds + 60:.1f}\n\n[agent]\ntimeout_sec = 1800.0\n\n"
            "[environment]\nbuild_timeout_sec = 300.0\ncpus = 1\nmemory_mb = 1024\nstorage_mb = 256\n"
        )


def _plain_file(text: str) -> CommitFile:
    return CommitFile(text.encode(), False)


def _script(text: str) -> CommitFile:
    return CommitFile(text.encode(), True)


def _folder_files(folder: Path) -> dict[str, CommitFile]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder of Python packages, such as `pip install --target` makes")
    places = (place for place in sorted(folder.rglob("*")) if place.is_file() and place.suffix != ".pyc")
    return {str(place.relative_to(folder)): CommitFile(place.read_bytes(), False) for place in places}


def _check_program() -> str:
    """Return the text of `tests/check.py`: modules of this package one after the other, without what they import of it."""
    library = resources.files("agentrl_workflows.terminal_tasks").joinpath("checks.py").read_text()
    return "\n\n".join(_without_imports(part) for part in (library, _module_text("suite"), _module_text("judge_suite")))


def _without_imports(source: str) -> str:
    return "".join(line for line in source.splitlines(keepends=True) if not line.startswith("from agentrl_workflows"))


def _module_text(name: str) -> str:
    return resources.files("agentrl_workflows.terminal_commits").joinpath(f"{name}.py").read_text()


def as_patterns(given: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns of tests: those that were given, or else the usual ones."""
    return tuple(given) or TESTS
