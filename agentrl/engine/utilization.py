"""How busy trainer, servers and driver were in a step, for the metrics and for the split of GPUs.

Invariant: a share is of the time since the last step; those of trainer and servers are at most 1.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from agentrl.processes.machine import count_cores

TRAINER_WORK = ("train_s", "sync_wait_s", "trainer.seconds_spot_check")
"""The keys of a `step` line whose seconds the trainer works."""


class BusyMeter:
    """Measures the steps of one process."""

    def __init__(self) -> None:
        """Start now."""
        self._most_tokens_per_s = 0.0
        self._processor_s = time.process_time()

    def step(self, elapsed_s: float, tokens_per_s: float, line: Mapping[str, object]) -> dict[str, float]:
        """Return the shares of a step that has just ended.

        Args:
            elapsed_s: seconds since the last one.
            tokens_per_s: sampled meanwhile.
            line: its other metrics.
        """
        self._most_tokens_per_s = max(self._most_tokens_per_s, tokens_per_s)
        now = time.process_time()
        used_s, self._processor_s = now - self._processor_s, now
        worked_s = sum(value for key in TRAINER_WORK if isinstance(value := line.get(key), float))
        return {
            "trainer_busy_share": min(1.0, worked_s / elapsed_s),
            "server_busy_share": tokens_per_s / self._most_tokens_per_s if self._most_tokens_per_s else 0.0,
            "driver_busy_cores": used_s / elapsed_s,
            "machine_cores": float(count_cores()),
        }
