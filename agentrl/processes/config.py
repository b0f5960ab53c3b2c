"""Settings of where the processes of a run start."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from agentrl.config.base import Config

LISTEN_PORT = 29600
"""Port of the driver at which ranks join under `launcher: attach`, where `listen` names none."""
_LISTEN_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?$"


class SplitConfig(Config):
    """How the GPUs are divided; `split: auto` leaves both numbers to a formula that the plan explains."""

    train: int | Literal["auto"] = Field(default="auto")
    """GPUs of the trainer, which set `trainer.parallel.dp`; `auto`: what makes steps shortest."""
    rollout: int | Literal["auto"] = Field(default="auto")
    """GPUs of servers, which set `inference.servers`; `auto`: those that the trainer leaves."""

    @field_validator("train", "rollout")
    @classmethod
    def _positive(cls, given: int | Literal["auto"]) -> int | Literal["auto"]:
        if isinstance(given, int) and given < 1:
            raise ValueError(f"expected auto or at least 1 GPU, got {given}")
        return given


class ClusterConfig(Config):
    """Where trainer ranks and servers run, and how they start."""

    launcher: Literal["local", "ray", "attach"] = "local"
    """`local`: on this machine. `ray`: on a Ray cluster. `attach`: Slurm, Kubernetes or torchrun starts trainer ranks."""
    address: str | None = None
    """Address of the Ray cluster, such as `auto` or `10.0.0.1:6379`; None: $RAY_ADDRESS, else one just for the run."""
    listen: str = Field(default="127.0.0.1", pattern=_LISTEN_PATTERN)
    """`HOST` or `HOST:PORT` of the driver at which trainer ranks join; a token guards it (AGENTRL_CLUSTER_TOKEN)."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds that processes wait for room on a Ray cluster, and the driver for ranks and workers to join."""
    gpus: int | Literal["auto"] = "auto"
    """GPUs that `split` divides; `auto`: this machine's GPUs."""
    split: SplitConfig | None = None
    """How many GPUs train and how many serve, `auto` or numbers. None: as `trainer.parallel` and `inference.servers` say."""
    resize: Literal["off", "advise", "at_restart"] = "advise"
    """What a run does whose trainer or servers idle: nothing, advise another split, or take and keep it at a restart."""

    @field_validator("listen")
    @classmethod
    def _port(cls, given: str) -> str:
        host, _, port = given.rpartition(":")
        if host and port.isdecimal() and int(port) > 65535:
            raise ValueError(f"expected a port of at most 65535, got {port}")
        return given

    @field_validator("split", mode="before")
    @classmethod
    def _accept_auto(cls, given: object) -> object:
        return {} if given == "auto" else given

    @field_validator("gpus")
    @classmethod
    def _enough(cls, given: int | Literal["auto"]) -> int | Literal["auto"]:
        if isinstance(given, int) and given < 2:
            raise ValueError(f"expected auto or at least 2 GPUs, one to train and one to serve, got {given}")
        return given


def listen_address(config: ClusterConfig) -> tuple[str, int]:
    """Return host and port at which ranks join; port 0 is any free one, for ranks that the driver starts itself.

    Example:
        >>> listen_address(ClusterConfig(listen="10.0.0.1:7000")), listen_address(ClusterConfig(listen="[::1]"))
        (('10.0.0.1', 7000), ('::1', 0))
    """
    address = config.listen
    bare = address.endswith("]") or ":" not in address
    host, port = (address, "") if bare else address.rsplit(":", 1)
    default = LISTEN_PORT if config.launcher == "attach" else 0
    return host.strip("[]"), int(port) if port else default
