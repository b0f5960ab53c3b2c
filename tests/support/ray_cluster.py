"""A Ray cluster of a head and two nodes on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 80 << 20


class LocalRayCluster:
    """A head with one CPU and two nodes with three; nodes can be removed and added."""

    def __init__(self, cluster: Any) -> None:  # noqa: ANN401 - Ray's class
        self._cluster = cluster
        self.address: str = cluster.address
        self._nodes: dict[str, Any] = {}

    def add_node(self) -> None:
        node = self._cluster.add_node(num_cpus=3, object_store_memory=STORE_BYTES)
        self._nodes[node.node_id] = node

    def remove_node(self, node_id: str) -> None:
        """End a node abruptly, with everything that Ray runs on it."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    @property
    def nodes(self) -> list[str]:
        """Ids of the nodes without the head."""
        return list(self._nodes)


@contextmanager
def ray_cluster() -> Generator[LocalRayCluster]:
    """Yield a cluster; the start is tried twice, because Ray gives a busy machine only 30 seconds for it."""
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    os.environ.update(RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0")
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head | {"temp_dir": folder})
        except Exception:  # noqa: BLE001 - Ray raises a bare one
            cluster = Cluster(initialize_head=True, head_node_args=head | {"temp_dir": folder})
        try:
            ours = LocalRayCluster(cluster)
            for _ in range(2):
                ours.add_node()
            yield ours
        finally:
            cluster.shutdown()
