"""The package `harbor`, asked in an environment of its own: `HARBOR_PYTHON=.../bin/python`, a Python 3.12 that has it."""

from __future__ import annotations

import os
import subprocess

HARBOR_PYTHON = os.environ.get("HARBOR_PYTHON")


def asked_of_harbor(program: str, *arguments: str) -> str:
    """Return what a program prints that imports `harbor`."""
    assert HARBOR_PYTHON is not None
    asked = subprocess.run([HARBOR_PYTHON, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout
