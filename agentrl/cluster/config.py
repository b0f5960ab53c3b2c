"""Settings of where the processes of a run start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.configbase import Config

LISTEN_PORT = 29600
"""Port of the driver at which ranks join under `launcher: attach`, where `listen` names none."""
_LISTEN_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?$"


class ClusterConfig(Config):
    """Where trainer ranks and servers run, and how they start."""

    launcher: Literal["local", "ray", "attach"] = "local"
    """`local`: on this machine. `ray`: on a Ray cluster. `attach`: Slurm, Kubernetes or torchrun starts trainer ranks."""
    address: str | None = None
    """Address of the Ray cluster, such as `auto` or `10.0.0.1:6379`; None: $RAY_ADDRESS, else one just for the run."""
    listen: str = Field(default="127.0.0.1", pattern=_LISTEN_PATTERN)
    """`HOST` or `HOST:PORT` of the driver at which trainer ranks join; a token guards it (AGENTRL_CLUSTER_TOKEN)."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that processes wait for room on a Ray cluster, and the driver for ranks to join."""


def listen_address(config: ClusterConfig) -> tuple[str, int]:
    """Return host and port at which ranks join; port 0 is any free one, for ranks that the driver starts itself.

    Example:
        >>> listen_address(ClusterConfig(listen="10.0.0.1:7000")), listen_address(ClusterConfig(listen="[::1]"))
        (('10.0.0.1', 7000), ('::1', 0))
    """
    given = config.listen
    bare = given.endswith("]") or ":" not in given
    host, port = (given, "") if bare else given.rsplit(":", 1)
    default = LISTEN_PORT if config.launcher == "attach" else 0
    return host.strip("[]"), int(port) if port else default
