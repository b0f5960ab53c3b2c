"""Settings for the transfer of weights from the trainer to the servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.base import Config


class SyncConfig(Config):
    """Through files, or straight from memory to memory; `sync: distributed` is short for `sync: {method: distributed}`."""

    method: Literal["auto", "disk", "distributed"] = "auto"
    """`disk`: through safetensors files. `distributed`: through a process group. `auto`: by topology, see the plan."""
    adapter: Literal["merged", "adapter"] = "merged"
    """With `trainer.lora`: `merged` sends whole weights. `adapter` sends the adapter, under a name for each version, from
    disk: servers do not pause, and a call ends under the version that it began with."""
    bucket_mb: int = Field(default=64, ge=1)
    """Megabytes sent in one piece while the next are gathered; trainer and server each hold two such pieces."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`gloo`: through sockets. `nccl`: between GPUs that trainer and servers do not share. `auto`: nccl where it can be."""
    address: str = "127.0.0.1"
    """Address of this host that servers connect to. Off loopback no key guards it: who reaches it can read the weights."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline, seconds, of joining a group and of sending one piece; a server that misses it is evicted."""
