"""Environments: typed ones, those that speak in chat messages, their pool, and their names."""

from agentrl.env.chat import ChatEnvironment, ChatStart, ChatStep, EnvironmentLimits, EpisodeEnd, environment_seed
from agentrl.env.faults import environment_boundary, note_metric, watch_faults, watch_metrics
from agentrl.env.pool import EnvironmentPool
from agentrl.env.registry import load_environment
from agentrl.env.threads import call_in_thread
from agentrl.env.typed import CLOSE_TIMEOUT_S, Environment, OpenEnvironment, open_environment

__all__ = [
    "CLOSE_TIMEOUT_S",
    "ChatEnvironment",
    "ChatStart",
    "ChatStep",
    "Environment",
    "EnvironmentLimits",
    "EnvironmentPool",
    "EpisodeEnd",
    "OpenEnvironment",
    "call_in_thread",
    "environment_boundary",
    "environment_seed",
    "load_environment",
    "note_metric",
    "open_environment",
    "watch_faults",
    "watch_metrics",
]
