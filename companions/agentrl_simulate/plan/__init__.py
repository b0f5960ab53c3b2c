"""Splits of GPUs and predictions for a run file: `cluster.split` and `agentrl simulate`."""

from __future__ import annotations

from typing import Final

from agentrl.support.companions import Command

COMMANDS: Final = {
    "simulate": Command(
        "agentrl_simulate.plan.command:simulate_command",
        "Predict step time, utilization and staleness of a run on a cluster, and what to change, without the cluster.",
    ),
}
