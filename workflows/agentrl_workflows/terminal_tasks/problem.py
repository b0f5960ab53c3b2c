"""One bundled terminal task, and its folder in the format of Harbor.

Invariant: the oracle earns 1.0, and an agent that does nothing, and each of the wrong ones, 0.0
(`tests/workflows/terminal/test_bundled_terminal_tasks.py`).
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

_TOML: Final = """\
schema_version = "1.1"

[metadata]
author_name = "agentrl"
difficulty = "{difficulty}"
level = {level}
category = "{category}"

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
        (folder / "instruction.md").write_text(_text(self.ask))
        steps = [f"FROM {IMAGE}", "WORKDIR /app", *(["COPY app /app"] if self.files else [])]
        if self.prepare:
            (folder / "environment" / "prepare.sh").write_text(f"set -e\n{_text(self.prepare)}")
            steps += ["COPY prepare.sh /opt/prepare.sh", "RUN bash /opt/prepare.sh && rm /opt/prepare.sh"]
        (folder / "environment" / "Dockerfile").write_text("\n".join([*steps, ""]))
        for name, data in self.files.items():
            place = folder / "environment" / "app" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data if isinstance(data, bytes) else data.encode())
        library = Path(__file__).with_name("checks.py").read_text()
        (folder / "tests" / "test.sh").write_text(_TEST)
        (folder / "tests" / "check.py").write_text(f"{library}\n\n{_text(self.check)}")
        (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\nset -e\n{_text(self.solve)}")
        for script in ("tests/test.sh", "solution/solve.sh"):
            (folder / script).chmod(0o755)
        return folder


def _text(block: str) -> str:
    return textwrap.dedent(block).strip("\n") + "\n"


def as_base64(data: bytes) -> str:
    """Return bytes as one line of text."""
    return base64.b64encode(data).decode()


def write_problems(problems: Iterable[Problem], folder: Path) -> list[Path]:
    """Write the folders of problems below `folder`, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    return [problem.write(folder) for problem in problems]


def cached_folder(problems: Iterable[Problem], name: str) -> Path:
    """Return a folder with the tasks of these problems, which is written once for each version of them."""
    with TemporaryDirectory(prefix="agentrl-tasks-", ignore_cleanup_errors=True) as place:
        made = Path(place) / "made"
        digest = hashlib.sha256()
        write_problems(problems, made)
        for path in sorted(made.rglob("*")):
            digest.update(str(path.relative_to(made)).encode() + (path.read_bytes() if path.is_file() else b""))
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        target = home / "agentrl" / "terminal-tasks" / f"{name}-{digest.hexdigest()[:12]}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            aside = target.with_name(f"{target.name}.{os.getpid()}")
            shutil.copytree(made, aside)
            try:
                aside.rename(target)
            except OSError:  # another process was faster
                shutil.rmtree(aside)
    return target
