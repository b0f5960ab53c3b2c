"""Words for the metrics of the page: a name that people read, the unit, and the meaning from the reference of metrics.

Invariant: a metric that the reference describes is described here, also one that this module does not know by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from agentrl.observe.metric_keys import METRIC_KEYS

_NAMES: Final = {
    "return_mean": "mean return",
    "turns_mean": "turns of an episode",
    "output_tokens_mean": "output tokens of an episode",
    "tokens_per_s": "tokens per second",
    "return_std": "spread of returns",
    "signal_share": "groups with a signal",
    "zero_variance_groups": "groups without a signal",
    "trainer_wait_s": "trainer waits for episodes",
    "rollout_wait_s": "rollouts wait for the trainer",
    "loop_blocked_s": "event loop blocked",
    "train_s": "training",
    "publish_s": "publishing weights",
    "update_s": "updating servers",
    "pause_s": "servers paused",
    "sync_wait_s": "trainer waits for weights",
    "probe_difference": "largest log-prob difference on the probe",
    "trainer.grad_norm": "gradient norm",
    "trainer.lr": "learning rate",
    "trainer.kl_behavior_proximal_k1": "KL, estimate k1",
    "trainer.kl_behavior_proximal_k3": "KL, estimate k3",
    "trainer.max_logprob_difference": "largest log-prob difference",
    "trainer.mean_logprob_difference": "mean log-prob difference",
}
"""Names of keys whose own words say too little."""
_WORDS: Final = {
    "kl": "KL",
    "lr": "learning rate",
    "logprob": "log-prob",
    "std": "spread",
    "p50": "median",
    "num": "number of",
}
_SUFFIX: Final = re.compile(r"_(s|seconds)$")


class MetricName(NamedTuple):
    """What the page says of a key of `metrics.jsonl`."""

    name: str
    unit: str
    meaning: str
    family: str
    """The key in the reference where it stands for several, such as `forks.REASON`; else empty."""


def describe_metric(key: str, event: str = "step") -> MetricName:
    """Return the words for a key of a line of `event`.

    Example:
        >>> describe_metric("staleness_p50").name
        'staleness median'
    """
    entries = [entry for entry in METRIC_KEYS if entry.event == event and (entry.key == key or entry.covers(key))]
    entry = next((found for found in entries if found.key == key), entries[0] if entries else None)
    if entry is None:
        return MetricName(_words_of_key(key), "", "", "")
    # The names of workflows and of other trainers have nothing in common but who reports them.
    is_family = entry.key != key and not entry.key.endswith(".NAME")
    meaning = entry.meaning.replace("`", "").replace("NAME", key.rpartition(".")[2])
    return MetricName(_words_of_key(key), entry.unit, meaning, entry.key if is_family else "")


def describe_metrics(events: Iterable[Mapping[str, object]]) -> dict[str, dict[str, str]]:
    """Return the words for the keys of steps and evaluations, as JSON; a key of both has the words of steps."""
    keys: dict[str, set[str]] = {"evaluation": set(), "step": set()}
    for event in events:
        keys.get(str(event["event"]), set()).update(event)
    return {key: describe_metric(key, kind)._asdict() for kind, found in keys.items() for key in sorted(found)}


def _words_of_key(key: str) -> str:
    if key in _NAMES:
        return _NAMES[key]
    plain = _SUFFIX.sub("", key.removeprefix("trainer.").removeprefix("workflow."))
    return " ".join(_WORDS.get(word, word) for word in re.split(r"[._]+", plain))
