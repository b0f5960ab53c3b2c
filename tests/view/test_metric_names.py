"""The page has words for every metric of a step and of an evaluation."""

from __future__ import annotations

from agentrl.observe.metric_keys import METRIC_KEYS
from agentrl_viewer.view.metric_names import describe_metric, describe_metrics


def test_every_number_of_the_reference_has_a_name_and_a_meaning() -> None:
    for entry in METRIC_KEYS:
        if entry.event in ("step", "evaluation"):
            words = describe_metric(entry.key, entry.event)
            assert words.name.strip(), entry.key
            assert words.meaning, entry.key
            assert "_" not in words.name, entry.key


def test_keys_that_name_nothing_by_themselves_have_words() -> None:
    words = describe_metric("trainer.kl_behavior_proximal_k1")
    assert (words.name, words.unit) == ("KL, estimate k1", "nats per token")
    assert "KL(behavior, proximal)" in words.meaning


def test_keys_of_one_kind_are_a_family_and_those_of_a_workflow_are_not() -> None:
    assert describe_metric("forks.history_edited").family == "forks.REASON"
    assert describe_metric("workflow.correct").family == ""
    assert "client.record(correct=...)" in describe_metric("workflow.correct").meaning


def test_a_key_that_the_reference_does_not_know_is_named_by_its_words() -> None:
    assert describe_metric("trainer.own_number").name == "own number"
    events = [{"event": "step", "success_rate": 1.0}, {"event": "evaluation", "seconds": 2.0}, {"event": "end", "other": 1}]
    assert set(describe_metrics(events)) == {"event", "success_rate", "seconds"}
