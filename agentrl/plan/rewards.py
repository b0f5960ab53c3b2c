"""Whether the rewards that a workflow sets fit the run's advantage estimator, judged from the workflow's source.

Invariant: nothing is run. What the source does not show is not warned about; the run itself warns at the first episode.
"""

from __future__ import annotations

import ast
import inspect
from textwrap import dedent

from agentrl.config import RunConfig
from agentrl.engine.skipped import TURN_REWARDS_ADVICE
from agentrl.errors import ConfigError
from agentrl.workflow import import_user_module


def reward_warnings(config: RunConfig) -> list[str]:
    """Return a warning where the workflow rewards single turns and the estimator gives every turn the whole return."""
    if config.algorithm.advantage != "episode":
        return []
    module, _, name = config.workflow.partition(":")
    try:
        found: object = getattr(import_user_module(module), name)
        source = dedent(inspect.getsource(found if inspect.isfunction(found) or inspect.isclass(found) else type(found)))
    except (ConfigError, AttributeError, OSError, TypeError):  # reported elsewhere, or without a source
        return []
    if not _rewards_turns(source):
        return []
    return [f"{config.workflow} rewards single turns (`client.reward`), but {TURN_REWARDS_ADVICE}"]


def _rewards_turns(source: str) -> bool:
    """Return whether the source calls `reward` of some object with a completion and a value.

    Example:
        >>> _rewards_turns("client.reward(completion, 1.0)"), _rewards_turns("grader.reward(text)")
        (True, False)
    """
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr == "reward" and len(call.args) + len(call.keywords) == 2
        for call in calls
    )
