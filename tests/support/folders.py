"""Runs pytest in folders whose modules may have the same names: each in a fork of one process that has imported agentrl."""

from __future__ import annotations

import importlib
import os
import sys

import pytest


def passes(folder: str) -> bool:
    """Return whether the tests of a folder pass."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    os.chdir(folder)
    sys.path.insert(0, folder)
    rewritten = "ignore::pytest.PytestAssertRewriteWarning"  # of plugins that are imported already
    code = pytest.main(["-q", "-W", "error", "-W", rewritten, "-p", "no:cacheprovider", "--rootdir", folder, folder])
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    importlib.import_module("agentrl_testing")  # once for all folders
    failed = [folder for folder in sys.argv[1:] if not passes(folder)]
    sys.exit(f"tests fail in {failed}" if failed else 0)
