"""The things that an agent has for one episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

from agentrl.client import Client, Door, MessageLike
from agentrl.types import Task
from agentrl_sandbox.containers import Container
from agentrl_sandbox.harbor.task import HarborTask
from agentrl_workflows.terminal.feedback import TurnFeedback


class Workplace(NamedTuple):
    """What the agent of one episode has."""

    container: Container
    harbor: HarborTask
    door: Door | None
    """The way to the policy for programs in the container, where the workflow is `served`."""
    feedback: TurnFeedback
    """Rewards the last turn where the task offers feedback: `await place.feedback.give(client)`."""
    conversation: list[MessageLike]
    """Messages of earlier steps; empty where the step begins anew. The agent adds the messages that later steps need."""


Work: TypeAlias = Callable[[Task, Client, Workplace], Awaitable[None]]
"""The work of an agent, which changes what the container holds."""
