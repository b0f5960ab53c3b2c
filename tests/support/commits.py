"""A small project at two commits, and git repositories of such projects."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

TEST = """import unittest
from pocket import purse

class PurseTest(unittest.TestCase):
    def test_total(self):
        self.assertEqual(purse.total([1, 2]), 3)

    def test_empty(self):
        self.assertEqual(purse.total([]), 0)
"""
BEFORE = {
    "pocket/__init__.py": "",
    "pocket/purse.py": "def total(coins):\n    return coins[0] + coins[1]\n",
    "tests/__init__.py": "",
    "tests/test_purse.py": TEST.rpartition("\n    def")[0],
    "README.md": "A purse.\n",
}
AFTER = {
    **BEFORE,
    "pocket/purse.py": "from pocket.tools import add\n\n\ndef total(coins):\n    return add(coins)\n",
    "pocket/tools.py": "def add(coins):\n    return sum(coins)\n",
    "tests/test_purse.py": TEST,
}
del AFTER["README.md"]


def make_repository(folder: Path, *commits: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True)
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ("-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false")

    def git(*words: str) -> None:
        subprocess.run(["git", *who, "-C", str(folder), *words], check=True, capture_output=True, env=own)

    git("init", "-q")
    for number, files in enumerate(commits):
        git("rm", "-rqf", "--ignore-unmatch", ".")
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        git("add", "-A", "-f")
        git("commit", "-q", "--allow-empty", "-m", f"Let the purse be empty ({number})")
    return folder
