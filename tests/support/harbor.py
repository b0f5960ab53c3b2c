"""A task folder of Harbor for tests."""

from __future__ import annotations

from pathlib import Path

TOML = """
schema_version = "1.4"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
env = {CHECK = "yes"}
[environment]
memory = "2G"
storage_mb = 512
env = {MODE = "work"}
[solution]
env = {HINT = "42"}
"""


def write_task(folder: Path, toml: str = TOML, dockerfile: str = "FROM debian:12\nWORKDIR /srv/job\nCOPY a.txt .\n") -> Path:
    for part in ("environment", "tests", "solution"):
        (folder / part).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write 42 to b.txt.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "environment" / "a.txt").write_text("hello\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "solution" / "solve.sh").write_text("echo 42 > b.txt\n")
    return folder
