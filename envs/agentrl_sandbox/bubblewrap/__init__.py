"""The default backend: bubblewrap, hardened, and always entered from an unprivileged user."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_sandbox.base import BoxSandbox
from agentrl_sandbox.bubblewrap.host import UserIds, find_host
from agentrl_sandbox.bubblewrap.seccomp import native_architecture, seccomp_filter
from agentrl_sandbox.bubblewrap.selftest import check_isolation
from agentrl_sandbox.bubblewrap.start import SUPERVISOR_FOLDER, BubblewrapStarter
from agentrl_sandbox.bubblewrap.usage import find_control_groups
from agentrl_sandbox.types import Limits

_UIDS = UserIds()


async def open_bubblewrap(
    *,
    limits: Limits | None = None,
    bwrap: str | None = None,
    python: str | None = None,
    readable: Sequence[str] = (),
) -> BoxSandbox:
    """Return a sandbox after it has proved, in about a tenth of a second, that it holds on this machine.

    Args:
        limits: of runs that bring none.
        bwrap: path of bubblewrap; None: the one of the system.
        python: path of the sandbox's Python; None: the system's. One outside `/usr` needs its tree in `readable`.
        readable: further directories and files that programs may read.

    Raises:
        ConfigError: something is missing, or the self-test found a hole; the message has the reason and the fix.
    """
    host = find_host(bwrap=bwrap, python=python, readable=readable)
    starter = BubblewrapStarter(host, seccomp_filter(native_architecture()), _UIDS, find_control_groups())
    await check_isolation(starter, readable)
    session, forks = (
        (host.python, "-I", "-S", "-B", f"{SUPERVISOR_FOLDER}/{name}.py") for name in ("supervisor", "programs")
    )
    return BoxSandbox("bubblewrap", starter, session, is_isolated=True, limits=limits, forks=forks, has_passages=True)
