"""`python -m agentrl_sandbox.hosts.sandbox_server`: a host that runs programs, on a free port, and gives no containers.

Its options are those of `agentrl sandbox-host`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.commands.main import main as run_agentrl


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the server until SIGTERM or SIGINT."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    port = [] if any(word.partition("=")[0] == "--port" for word in given) else ["--port", "0"]
    run_agentrl(["sandbox-host", "--no-containers", *port, *given])


if __name__ == "__main__":
    main()
