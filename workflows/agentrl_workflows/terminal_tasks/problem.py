"""One bundled terminal task, and its folder in the format of Harbor.

Invariant: the oracle earns 1.0, and an agent that does nothing, and each of the wrong ones, 0.0
(`tests/workflows/terminal/test_bundled_terminal_tasks.py`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_TOML: Final = """\
schema_version = "1.1"

[metadata]
author_name = "agentrl"
difficulty = "{difficulty}"
level = {level}
category = "{category}"

[metadata.agentrl.needs]
"python3 with ctypes" = "python3 -c 'import ctypes'"
git = "git --version"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 600.0

[environment]
build_timeout_sec = 300.0
cpus = 1
memory_mb = 512
storage_mb = 128
"""
_TEST: Final = "#!/bin/bash\nexec python3 -I /tests/check.py\n"
_DIFFICULTIES: Final = ("easy", "medium", "hard", "expert")
IMAGE: Final = "debian:12"
"""Tasks use its bash, coreutils, Python and git, which a machine of Debian's kind has itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One task."""

    name: str
    level: int
    """1 to 4."""
    category: str
    ask: str
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    """First contents of `/app`, by path."""
    prepare: str = ""
    """Bash that runs in `/app` once the files are there."""
    solve: str
    """Bash of the oracle."""
    check: str
    """Python of the test, after `checks.py`; it ends with `pay`."""
    wrong: tuple[str, str]
    """Bash of two agents that get it wrong in a likely way."""

    def write(self, root: Path) -> Path:
        """Write the folder below `root` and return it."""
        folder = root / self.name
        for part in ("environment/app", "tests", "solution"):
            (folder / part).mkdir(parents=True)
        values = {"difficulty": _DIFFICULTIES[self.level - 1], "level": self.level, "category": self.category}
        (folder / "task.toml").write_text(_TOML.format(**values))
        (folder / "instruction.md").write_text(_dedented(self.ask))
        steps = [f"FROM {IMAGE}", "WORKDIR /app", *(["COPY app /app"] if self.files else [])]
        if self.prepare:
            (folder / "environment" / "prepare.sh").write_text(f"set -e\n{_dedented(self.prepare)}")
            steps += ["COPY prepare.sh /opt/prepare.sh", "RUN bash /opt/prepare.sh && rm /opt/prepare.sh"]
        (folder / "environment" / "Dockerfile").write_text("\n".join([*steps, ""]))
        for name, data in self.files.items():
            place = folder / "environment" / "app" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data if isinstance(data, bytes) else data.encode())
        library = Path(__file__).with_name("checks.py").read_text()
        (folder / "tests" / "test.sh").write_text(_TEST)
        (folder / "tests" / "check.py").write_text(f"{library}\n\n{_dedented(self.check)}")
        (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\nset -e\n{_dedented(self.solve)}")
        for script in ("tests/test.sh", "solution/solve.sh"):
            (folder / script).chmod(0o755)
        return folder


def _dedented(block: str) -> str:
    return textwrap.dedent(block).strip("\n") + "\n"


def write_problems(problems: Iterable[Problem], folder: Path) -> list[Path]:
    """Write the folders of problems below `folder`, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    return [problem.write(folder) for problem in problems]


def cached_folder(problems: Iterable[Problem], name: str) -> Path:
    """Return a folder with the tasks of these problems, which is written once for each version of them."""
    found = list(problems)
    own = Path(__file__).read_bytes() + Path(__file__).with_name("checks.py").read_bytes()
    digest = hashlib.sha256(own + repr(found).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = home / "agentrl" / "terminal-tasks" / f"{name}-{digest}"
    if not target.exists():
        aside = target.with_name(f"{target.name}.{os.getpid()}")
        write_problems(found, aside)
        try:
            aside.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(aside)
    return target
