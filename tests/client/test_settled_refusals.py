"""Refused calls that are the policy's doing end no episode; servers that fail still do."""

from __future__ import annotations

from agentrl.client.episode import EpisodeCalls
from agentrl.errors import ServerUnavailable, WorkflowError
from agentrl.types import StopReason

REFUSED = WorkflowError("model call: temperature must be a number")
DOWN = ServerUnavailable("the server is gone")


def calls() -> EpisodeCalls:
    return EpisodeCalls("e1", max_turns=1, max_tokens=None)


def test_a_refusal_is_settled_whether_it_comes_before_or_after() -> None:
    found = calls()
    found.fail(REFUSED)
    assert found.unresolved is REFUSED
    assert found.settle_refusals() == 1
    assert found.unresolved is None
    found.fail(WorkflowError("another"))
    assert found.unresolved is None
    assert found.settle_refusals() == 2


def test_a_failed_server_is_not_hidden_by_a_refusal_or_by_a_call_that_ran_meanwhile() -> None:
    found = calls()
    found.fail(REFUSED)
    running = found.start_call()
    found.settle_refusals()
    found.resolve(found.num_failures)  # as that call does when it completes
    running.close()
    found.fail(DOWN)
    found.fail(WorkflowError("a wrong one behind it"))
    assert found.unresolved is DOWN


def test_a_limit_counts_although_a_refusal_follows_it() -> None:
    found = calls()
    found.exceeded(StopReason.TURN_LIMIT, "1 of 1 turns are spent")
    found.fail(REFUSED)
    assert found.limit_reached is None
    found.settle_refusals()
    assert found.limit_reached is StopReason.TURN_LIMIT
