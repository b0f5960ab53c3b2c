"""Budgets of an episode and the rules for a group with a failed member."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from agentrl.config.base import Config

LEAST_KEPT = 2
"""Fewest episodes of an incomplete group that is kept: a group of one has no advantage."""


class RolloutConfig(Config):
    """How many episodes run at once, how long each may take, and how a failed episode affects its group."""

    max_concurrent_episodes: int = Field(default=64, ge=1)
    """Episodes in flight; about half a batch to one batch keeps staleness low."""
    runner: Literal["local", "processes", "ray"] = "local"
    """Where the episodes of training and evaluation run: `local`, in the process of the run, in worker `processes` of this
    machine, which use its other cores, or in workers on the nodes of a `ray` cluster (`cluster.address`)."""
    workers: Literal["auto"] | PositiveInt = "auto"
    """Workers of `runner: processes` and `ray`; auto: one for each core of this machine but one; on Ray, one for each 128
    episodes at once."""
    episode_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one episode, seconds of wall clock. It is a limit, with the workflow's `deadline_reward`, if calls of the
    model took at least half of it, none of them over a tenth, and the last one ended, or was cut off, in the last tenth;
    elsewhere, and where a tool or an environment has run into it or the last call failed, a failure."""
    max_turns: int | None = Field(default=None, ge=1)
    """Model calls of one episode; None leaves it to the workflow."""
    max_episode_tokens: int | None = Field(default=None, ge=1)
    """Sampled tokens of one episode; None leaves it to the servers' context."""
    episode_retries: int = Field(default=1, ge=0)
    """Times that a failed member of a group runs again, from the start, before the group counts as incomplete."""
    incomplete_group: Literal["drop", "keep"] = "drop"
    """A group with members whose retries failed, too: `drop` it, or `keep` the others if there are two."""
    max_failure_rate: float = Field(default=0.5, gt=0, le=1)
    """Share of failed episodes, over the last 64, that stops the run; over all of them, that makes `agentrl eval` fail."""
    max_consecutive_failures: int = Field(default=32, ge=1)
    """Failed episodes in a row, or groups in a row dropped for them, that stop the run and print the first traceback."""
