"""A Ray cluster of a head and two nodes on this machine, one of which may be killed.

Invariant: when the block ends, every process of the cluster has ended. What is left after the loss of a node has room for
four processes.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

HEAD_CPUS = 1
NODE_CPUS = 3
_STORE_BYTES = 80 << 20


class LocalRayCluster:
    """A head and nodes; use it from the main thread, as Ray demands."""

    def __init__(self, cluster: Any) -> None:  # noqa: ANN401 - Ray's class
        """Wrap a cluster that has a head; `ray_cluster` makes one."""
        self._cluster = cluster
        self.address: str = cluster.address
        """What `cluster.address` of a run file takes."""
        self._nodes: dict[str, Any] = {}

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes without the head."""
        return list(self._nodes)

    def add_node(self) -> None:
        """Add a node of `NODE_CPUS`."""
        node = self._cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=_STORE_BYTES)
        self._nodes[node.node_id] = node

    def kill_node(self, node_id: str) -> None:
        """Kill a node abruptly, with everything that Ray runs on it."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def node_of(self, log: Path) -> str | None:
        """Return the node on which the process of a log started last; None where that is the head."""
        found = re.findall(r"starts on node \S+ \((\w+)\)", log.read_text(errors="replace"))
        return next((node for node in self._nodes if found and node.startswith(found[-1])), None)


@contextmanager
def ray_cluster() -> Generator[LocalRayCluster]:
    """Yield a cluster of a head and two nodes; the start is tried twice, because Ray gives it only 30 seconds.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("a Ray cluster needs a package that is missing: pip install 'agentrl[ray]'") from None
    # Ray gives its processes a low priority otherwise, which they pass on.
    os.environ.update(RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0")
    # Ray writes the address of the cluster there, too, and expects the folder to exist.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        head = {
            "num_cpus": HEAD_CPUS,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            "temp_dir": folder,
        }
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head)
        except Exception:  # noqa: BLE001 - Ray raises a bare one
            cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            ours = LocalRayCluster(cluster)
            for _ in range(2):
                ours.add_node()
            yield ours
        finally:
            cluster.shutdown()
