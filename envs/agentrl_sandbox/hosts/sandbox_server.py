"""`python -m agentrl_sandbox.hosts.sandbox_server`: a host that runs programs, on a free port, and gives no containers.

Its options are those of `agentrl sandbox-host`, whose process it becomes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def host_words(arguments: Sequence[str]) -> list[str]:
    """Return the words of the host's process.

    Example:
        >>> host_words(["--max", "wall_s=60"])[3:]
        ['sandbox-host', '--no-containers', '--port', '0', '--max', 'wall_s=60']
    """
    port = [] if any(word.partition("=")[0] == "--port" for word in arguments) else ["--port", "0"]
    return [sys.executable, "-m", "agentrl", "sandbox-host", "--no-containers", *port, *arguments]


if __name__ == "__main__":
    os.execv(sys.executable, host_words(sys.argv[1:]))
