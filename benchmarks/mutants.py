"""Which tests see a broken line: the mutants of benchmarks/mutants.toml, one at a time in a copy of the repository.

    python -m benchmarks.mutants                   (about an hour, the first time; --jobs 2: two mutants at a time)
    python -m benchmarks.mutants --only NAME ...   some of them

A mutant is a file, an exact text in it, what takes its place, and the tests near it. They run until one fails. A mutant
that none of them sees survives, unless the table says why it changes nothing that could be seen. The program prints a line a
mutant and writes benchmarks/results/mutants.json after each, so it can be stopped. Mutants that a test killed are not
run again while file and mutant stay as they are; survivors are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import msgspec

from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).parent / "mutants.toml"
RESULTS = Path(__file__).parent / "results" / "mutants.json"
LIMIT_S = 400
"""A run of tests that takes longer hangs, which is as good as a failure."""
HUNG = 99
"""Exit status of such a run."""
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Of packages that are loaded before pytest."""
WARM = """
import json, os, sys, threading
import aiohttp, hypothesis.strategies, numpy, openai, pydantic, pytest, torch, trio
from transformers.models.qwen3 import modeling_qwen3
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(asked["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1), os.dup2(output, 2)
        os.chdir(asked["root"])
        sys.path[:0] = asked["path"]
        last = threading.Timer(asked["limit_s"], os._exit, [asked["hung"]])
        last.daemon = True
        last.start()
        code = pytest.main(asked["arguments"])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has loaded the packages of others, and forks for each run of tests; it never imports this repository."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table."""

    name: str
    file: str
    before: str
    after: str
    near: str = ""
    """Name of a set of tests in the table."""
    equivalent: str = ""
    """Why no test can see it; empty where one should."""

    def digest(self, root: Path) -> str:
        """Return what changes when a former result says nothing any more."""
        parts = (self.before, self.after, self.near, (root / self.file).read_text())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of mutants."""

    near: dict[str, list[str]]
    mutant: list[Mutant]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What became of a mutant."""

    name: str
    file: str
    line: int
    outcome: str
    """`killed`, `survived` or `equivalent`."""
    by: str = ""
    """The first test that failed, or why the mutant is equivalent."""
    digest: str = ""


@dataclass(frozen=True)
class Copy:
    """A copy of the repository, in which one mutant at a time is applied, and the process that runs its tests."""

    root: Path
    warm: subprocess.Popen[str]

    @classmethod
    def make(cls, folder: Path) -> Copy:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, folder / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        path = os.pathsep.join(str(folder / part) for part in ("", "workflows", "envs"))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        warm = subprocess.Popen(
            [sys.executable, "-c", WARM],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return cls(folder, warm)

    def first_failure(self, tests: Sequence[str]) -> str | None:
        """Run tests until one fails; return its name, or None."""
        assert self.warm.stdin is not None
        assert self.warm.stdout is not None
        output = self.root / ".output"
        arguments = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *QUIET, *tests]
        path = [str(self.root / part) for part in ("", "workflows", "envs")]
        asked = {"root": str(self.root), "path": path, "arguments": arguments, "output": str(output)}
        asked |= {"limit_s": LIMIT_S, "hung": HUNG}
        self.warm.stdin.write(json.dumps(asked) + "\n")
        self.warm.stdin.flush()
        code = int(self.warm.stdout.readline())
        if code == 0:
            return None
        if code == HUNG:
            return f"no end within {LIMIT_S} s"
        text = output.read_text()
        failed = (line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR ")))
        first = next(failed, None)
        if first is None:
            raise RuntimeError(f"pytest ended with {code} and named no test:\n{text}")
        return first.split(maxsplit=1)[1].partition(" - ")[0]

    def judge(self, mutant: Mutant, tests: Sequence[str]) -> Outcome:
        """Apply a mutant, run its tests, and take it back."""
        path, digest = self.root / mutant.file, mutant.digest(self.root)
        text = path.read_text()
        self._replace(path, text.replace(mutant.before, mutant.after))
        try:
            failure = self.first_failure(tests)
        finally:
            self._replace(path, text)
        outcome = "survived" if failure is None else "killed"
        line = line_of(text, mutant)
        return Outcome(name=mutant.name, file=mutant.file, line=line, outcome=outcome, by=failure or "", digest=digest)

    def _replace(self, path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # it is told from the file by size and second alone


def line_of(text: str, mutant: Mutant) -> int:
    """Return the number of the first line that a mutant changes."""
    pairs = enumerate(zip(mutant.before, mutant.after, strict=False))
    same = next((at for at, (one, other) in pairs if one != other), min(len(mutant.before), len(mutant.after)))
    return text[: text.index(mutant.before) + same].count("\n") + 1


def read_table() -> Table:
    """Return the table; ValueError names mutants whose text is not there exactly once, and names that stand twice."""
    table = msgspec.convert(tomllib.loads(TABLE.read_text()), Table)
    wrong = [each.name for each in table.mutant if (ROOT / each.file).read_text().count(each.before) != 1]
    wrong += [each.name for each in table.mutant if not each.equivalent and each.near not in table.near]
    wrong += [name for name, count in Counter(each.name for each in table.mutant).items() if count > 1]
    if wrong:
        expected = "a text that the file has once, a set of tests, and a name of its own"
        raise ValueError(f"{TABLE.name}: expected {expected}: {wrong}")
    return table


def write(table: Table, found: Mapping[str, Outcome]) -> None:
    """Write the results, in the order of the table."""
    ordered = [found[each.name] for each in table.mutant if each.name in found]
    record = {
        "machine": describe_machine("pytest"),
        "counts": Counter(each.outcome for each in ordered),
        "mutants": msgspec.to_builtins(ordered),
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def judge_all(table: Table, chosen: Sequence[Mutant], found: dict[str, Outcome], jobs: int) -> None:
    """Judge mutants, `jobs` at a time, each in a copy of its own; write after each."""
    lock = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        made = [Copy.make(Path(folder) / str(number)) for number in range(jobs)]
        copies: SimpleQueue[Copy] = SimpleQueue()
        for copy in made:
            copies.put(copy)

        def one(mutant: Mutant) -> None:
            copy = copies.get()
            try:
                outcome = copy.judge(mutant, table.near[mutant.near])
            finally:
                copies.put(copy)
            with lock:
                found[mutant.name] = outcome
                print(f"{outcome.outcome:<9} {mutant.name:<52} {outcome.by}", flush=True)
                write(table, found)

        try:
            list(pool.map(one, chosen))
        finally:
            for copy in made:
                copy.warm.kill()


def is_unknown(mutant: Mutant, found: Mapping[str, Outcome]) -> bool:
    """Return whether a mutant has no result that still holds."""
    return mutant.name not in found or found[mutant.name].digest != mutant.digest(ROOT)


def main() -> None:
    """Judge the mutants that have no result yet, print and record; exit 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="NAME", help="the mutants to run, whatever is known of them"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    arguments = parser.parse_args()
    table = read_table()
    known = msgspec.convert(json.loads(RESULTS.read_text())["mutants"], list[Outcome]) if RESULTS.exists() else []
    found = {each.name: each for each in known if each.outcome == "killed"}
    chosen: list[Mutant] = []
    for mutant in table.mutant:
        text = (ROOT / mutant.file).read_text()
        if mutant.equivalent:
            line = line_of(text, mutant)
            found[mutant.name] = Outcome(
                name=mutant.name, file=mutant.file, line=line, outcome="equivalent", by=mutant.equivalent
            )
        elif mutant.name in arguments.only if arguments.only else is_unknown(mutant, found):
            chosen.append(mutant)
    judge_all(table, chosen, found, arguments.jobs)
    write(table, found)
    left = [name for name, each in found.items() if each.outcome == "survived"]
    print(f"{Counter(each.outcome for each in found.values())}; survivors: {left}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
