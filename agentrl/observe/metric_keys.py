"""What each key of `metrics.jsonl` means: the source of `docs/reference/metrics.md`.

Invariant: a run writes no key that is not listed here; a test compares the lists with the lines of real runs. In a key, a
part in capitals stands for a name that the run gives, such as the stop reason in `failed_episodes.STOP_REASON`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class MetricKey(NamedTuple):
    """A key of the lines of an event."""

    event: str
    """The `event` of the lines; `every` for a key that all lines have."""
    key: str
    unit: str
    """What its number counts; empty for text and lists."""
    meaning: str

    def covers(self, key: str) -> bool:
        """Return whether this entry describes `key`.

        Example:
            >>> MetricKey("step", "forks.REASON", "turns", "...").covers("forks.edited")
            True
        """
        parts = [".+" if part.isupper() else re.escape(part) for part in self.key.split(".")]
        return re.fullmatch(r"\.".join(parts), key) is not None


EVENTS = {
    "every": "keys of every line",
    "step": "one line for each training step",
    "evaluation": "one line for each evaluation, when it ends; its episodes ran beside training",
    "evaluation_skipped": "an evaluation was due while one ran and one waited",
    "publishing": "the servers are about to get the weights under a new version, which no later process uses for others",
    "published": "every serving server holds a version; the digests say which weights these are",
    "episode_failed": "one line for each failed attempt",
    "dropped_group": "a group left the run untrained",
    "checkpoint": "a checkpoint was written",
    "resumed": "another process continues from a checkpoint; `agentrl.open_run` leaves out the lines of work that was lost",
    "end": "the run, or this process of it, ended; counts are of this process alone",
}
"""The events, and when a line of each is written."""

OTHER_METRIC = "trainer.NAME"
"""The key that covers all of a trainer of one's own."""

_OUTCOMES: tuple[tuple[str, str, str], ...] = (
    (
        "pass_at.K",
        "share",
        "chance that one of K episodes of a task succeeds (pass@k), by the unbiased estimate; mean over the tasks with at "
        "least K results; K is a power of two",
    ),
    (
        "majority_rate",
        "share",
        "of the tasks whose most frequent answer is right, where the workflow names answers (`client.final_answer`)",
    ),
    ("turns_mean_by_outcome.OUTCOME", "turns", "per episode that succeeded (`right`), or ended without success (`wrong`)"),
    ("output_tokens_mean_by_outcome.OUTCOME", "tokens", "sampled per episode, by outcome"),
    ("truncated_share_by_outcome.OUTCOME", "share", "of the episodes of an outcome, cut by a limit: a turn, or the episode"),
)
"""Of the step's and of the evaluation's episodes."""

_SPEAKERS: tuple[tuple[str, str, str], ...] = (
    ("turns_mean_by_role.ROLE", "turns", "per episode, where turns have roles (`client.role`, sub-agents over HTTP)"),
    ("output_tokens_mean_by_role.ROLE", "tokens", "sampled per episode, by role"),
    ("forks_by_client.CLIENT", "turns", "that forked, by the program that asked over HTTP, where one did"),
    ("cached_share", "share", "of the prompts' tokens, from the servers' prefix caches"),
    (
        "lost_caches",
        "turns",
        "whose server held less than half of the turn that they continue, although no weight update came between: the "
        "session was dropped for others, or the episode moved to another server",
    ),
    (
        "cached_share_by_turn.N",
        "share",
        "`cached_share` by the number of the turn in its episode: `0`, `1`, `2_to_3`, and so on",
    ),
    ("left_out_turns", "turns", "that the run file keeps out of training (side calls)"),
    ("aborted_turns", "turns", "that the agent gave up: by a stream that it left, a timeout, or a cancelled scope"),
    ("aborted_tokens", "tokens", "sampled in such turns; they are trained like others"),
    (
        "truncated_sampling_tokens",
        "tokens",
        "sampled with `top_p` below 1, `top_k` or `min_p`, whose log-probs are those of the whole distribution",
    ),
)
"""Of the step's and of the evaluation's episodes."""

_TABLES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "every": (
        ("event", "", "the kind of the line"),
        ("wall_s", "seconds", "time on the run's clock, which continues over a resume"),
        ("policy_version", "version", "of the weights that serve; in a `step` line, the version that the step trained"),
    ),
    "step": (
        ("step", "step", "number of the step, from 1"),
        ("episodes", "episodes", "in the batch"),
        (
            "success_rate",
            "share",
            "of the batch's episodes that succeeded: those with `client.record(success=...)` of at least 0.5, or "
            "without that a final reward above 0",
        ),
        ("return_mean", "reward", "mean undiscounted return of the batch's episodes"),
        ("return_std", "reward", "standard deviation of these returns"),
        (
            "reward_parts.NAME",
            "reward",
            "mean of the part NAME of the returns, where rewards are given in parts (`client.reward_final({...})`)",
        ),
        *_OUTCOMES,
        ("turns_mean", "turns", "per episode"),
        ("output_tokens_mean", "tokens", "sampled per episode"),
        (
            "limits.STOP_REASON",
            "episodes",
            "ended by a limit: `turn_limit`, `token_limit`, `context_limit`, or a `deadline` of the policy's doing",
        ),
        ("workflow.NAME", "as recorded", "mean of what `client.record(NAME=...)` recorded, over the episodes that did"),
        (
            "workflow.gateway.NAME",
            "requests",
            "mean number with an ignored field (`ignored.FIELD`), that joined an earlier one (`joined_retries`), that were "
            "side calls (`side_calls`), or that another model answered (`passed_on.ROUTE`)",
        ),
        ("workflow.resent.CHANGE", "answers", "mean number that clients over HTTP sent back rewritten, and were restored"),
        ("workflow.unreported_calls", "calls", "mean number that agents gave up, of which no server told what it sampled"),
        ("workflow.refused_calls", "calls", "mean number that programs made and that were refused for what they asked"),
        ("workflow.unsupported_misses", "answers", "mean number that miss what `sampling.unsupported: prompt` asked for"),
        ("staleness_mean", "versions", "over the trained tokens of the batch"),
        ("staleness_p50", "versions", "median over the trained tokens of the batch"),
        ("staleness_p99", "versions", "99th percentile over the trained tokens of the batch"),
        ("staleness_max", "versions", "largest of a trained token of the batch"),
        ("groups", "groups", "in the batch"),
        ("zero_variance_groups", "groups", "whose returns are all equal, so that they teach nothing"),
        (
            "zero_variance_groups_by_outcome.OUTCOME",
            "groups",
            "of equal returns, with only successes (`right`) or none (`wrong`)",
        ),
        ("signal_share", "share", "of the groups whose returns differ"),
        ("advantage_mean", "reward", "mean advantage of the batch's sampled turns, each counted once"),
        ("advantage_std", "reward", "standard deviation of the advantages of the batch's sampled turns"),
        ("advantage_positive_share", "share", "of the batch's sampled turns that have an advantage above 0"),
        ("advantage_mean_by_role.ROLE", "reward", "as `advantage_mean`, where the workflow names roles (`client.role`)"),
        ("advantage_std_by_role.ROLE", "reward", "as `advantage_std`, by role"),
        ("advantage_positive_share_by_role.ROLE", "share", "as `advantage_positive_share`, by role"),
        ("advantage_mean_by_player.PLAYER", "reward", "as `advantage_mean`, where it names players (`client.as_player`)"),
        ("advantage_std_by_player.PLAYER", "reward", "as `advantage_std`, by player"),
        ("advantage_positive_share_by_player.PLAYER", "share", "as `advantage_positive_share`, by player"),
        ("trained_groups", "", "numbers of the batch's groups, oldest first"),
        ("loss_tokens", "tokens", "trained tokens of the batch"),
        ("skipped_draws", "draws", "of the run so far that left out a task that sits out a pass (`tasks.skip_passes`)"),
        ("resting_tasks.OUTCOME", "tasks", "that sit out the present pass, solved each time (`right`) or never (`wrong`)"),
        (
            "kl_reference",
            "nats per token",
            "of the policy that sampled to the reference, by `algorithm.reference.reward_k`; where rewards pay for it",
        ),
        (
            "masked_tokens",
            "tokens",
            "left out of the loss because they were over age (policy `mask`), or by `algorithm.shaping`",
        ),
        ("forks.REASON", "turns", "of the batch that forked, by reason"),
        *_SPEAKERS,
        ("kept_thinking_turns", "turns", "whose context holds reasoning that the chat template would have dropped"),
        ("sampled_tokens", "tokens", "sampled since this process began, evaluations included"),
        ("tokens_per_s", "tokens per second", "sampled since the last step"),
        ("trainer_wait_s", "seconds", "the trainer waited for this batch"),
        ("rollout_wait_s", "seconds", "rollouts waited for the staleness bound since the last step"),
        ("train_s", "seconds", "preparing the batch and training on it"),
        (
            "trainer_busy_share",
            "share",
            "of the time since the last step in which the trainer worked: spot check, training, update",
        ),
        ("server_busy_share", "share", "`tokens_per_s` of the most that a step of this process has had"),
        ("driver_busy_cores", "cores", "processor time of the driver over the time since the last step"),
        ("machine_cores", "cores", "that the driver may use"),
        ("loop_blocked_s", "seconds", "code blocked the event loop for 0.2 s or more at a time since the last step"),
        ("publish_s", "seconds", "copying the weights, computing the probe, and writing files, unless beside a step"),
        ("update_s", "seconds", "from then on, until every server held the weights"),
        ("pause_s", "seconds", "servers were paused for it"),
        ("update_bytes", "bytes", "of the weights, as each server read or was sent them"),
        ("sync_wait_s", "seconds", "the trainer waited for weights to be published"),
        ("sync_share", "share", "`sync_wait_s` of the time since the last step"),
        ("probe_difference", "nats", "largest difference of log-probs between server and trainer on the probe"),
        ("skipped", "", "why the weights stayed as they were: `zero_variance`, `no_tokens`, or the trainer's reason"),
        ("dropped_groups.REASON", "groups", "dropped since this process began, by reason"),
        (
            "failed_episodes.STOP_REASON",
            "episodes",
            "training attempts that failed since this process began, by stop reason",
        ),
        (
            "raised_after_turn.LINE",
            "episodes",
            "whose workflow raised at this line right after a turn: the model's output may be the cause",
        ),
        (
            "wasted_tokens.CAUSE",
            "tokens",
            "sampled for training since this process began and never trained: `failed_episode`, `dropped_group`, "
            "`over_age`, `filtered` (`algorithm.keep`), `skipped_step`, `left_out` (side calls), `shaped_out` "
            "(`algorithm.shaping`), `greedy` (temperature 0 has no policy gradient)",
        ),
        ("trainer.loss", "loss", "mean over the optimizer steps"),
        ("trainer.grad_norm", "norm", "of the gradient before clipping, mean over the optimizer steps"),
        (
            "trainer.grad_norm_by_minibatch.NUMBER",
            "norm",
            "of the gradient before clipping, in each optimizer step of the batch, numbered from 1",
        ),
        (
            "trainer.update_to_weight_ratio",
            "ratio",
            "L2 norm of the change of all weights in the last optimizer step, over the norm of the weights",
        ),
        ("trainer.lr", "rate", "learning rate of the last optimizer step, after `algorithm.guard`"),
        (
            "trainer.guard_factor",
            "ratio",
            "what `algorithm.guard` multiplied the learning rate by, mean over the optimizer steps; 1 without one",
        ),
        ("trainer.optimizer_steps", "steps", "optimizer steps taken"),
        ("trainer.bad_minibatches", "minibatches", "left out because loss or gradient was not finite"),
        ("trainer.tokens", "tokens", "of the batch's branches, contexts included"),
        ("trainer.computed_tokens", "tokens", "of the batch's branches that ran through the model"),
        (
            "trainer.shared_tokens",
            "tokens",
            "of the batch's branches that were computed once with those of another branch or episode",
        ),
        ("trainer.loss_tokens", "tokens", "trained"),
        ("trainer.num_loss_tokens", "tokens", "in the loss of the optimizer steps that were taken"),
        ("trainer.max_staleness", "versions", "largest of the trained tokens"),
        ("trainer.mean_staleness", "versions", "mean of the trained tokens"),
        ("trainer.kl_behavior_proximal_k1", "nats per token", "KL(behavior, proximal) by the estimator -log w"),
        (
            "trainer.kl_behavior_proximal_k3",
            "nats per token",
            "KL(behavior, proximal) by w - 1 - log w, which is never negative",
        ),
        ("trainer.effective_sample_size", "share", "(sum w)^2 / (n sum w^2); 1 where all behavior weights are equal"),
        (
            "trainer.sample_ess_ratio",
            "share",
            "(sum W)^2 / (n sum W^2), W = current / behavior of a whole branch before its optimizer step; of the branches "
            "that have a gradient",
        ),
        ("trainer.behavior_weight_mean", "ratio", "of w = exp(proximal - behavior), before the cap"),
        ("trainer.behavior_weight_max", "ratio", "largest w, before the cap"),
        ("trainer.behavior_log_weight_mean", "nats", "mean of abs(log w), staleness included"),
        ("trainer.behavior_log_weight_max", "nats", "largest abs(log w)"),
        ("trainer.ratio_max", "ratio", "largest exp(current - proximal)"),
        (
            "trainer.clip_fraction_positive",
            "share",
            "of the tokens with positive advantage: no gradient, as for `ppo` with a ratio above 1 + `clip_high`",
        ),
        (
            "trainer.clip_fraction_negative",
            "share",
            "of the tokens with negative advantage: no gradient, as for `ppo` with a ratio below 1 - `clip_low`",
        ),
        (
            "trainer.cap_fraction_positive",
            "share",
            "of the tokens with positive advantage: a correction limits their weight",
        ),
        (
            "trainer.cap_fraction_negative",
            "share",
            "of the tokens with negative advantage: a correction limits their weight",
        ),
        (
            "trainer.log_ratio_positive",
            "nats per token",
            "mean of log(current / behavior) over the tokens with positive advantage; below 0, others drag them down",
        ),
        ("trainer.fallen_fraction_negative", "share", "of the tokens with negative advantage: they fell by more than 0.2"),
        (
            "trainer.by_slot.FUNCTION.METRIC",
            "by metric",
            "of the functions that fill the slots: `kept` of a correction, `loss` and `weight` of a term, and their own",
        ),
        (
            "trainer.entropy",
            "nats per token",
            "of the proximal policy, estimated from the trained tokens by importance weights",
        ),
        (
            "trainer.entropy_by_turn.TURN",
            "nats per token",
            "as `entropy`, over the tokens of one turn of the episodes, from 0: `0` to `3`, `4_to_7`, `8_to_15`, `16_up`",
        ),
        (
            "trainer.loss_tokens_by_age.AGE",
            "tokens",
            "trained tokens of one age, the versions between sampling and training: `0` to `3`, `4_to_7`, `8_up`; of the "
            "branches that have a gradient",
        ),
        ("trainer.effective_sample_size_by_age.AGE", "share", "as `effective_sample_size`, over these tokens"),
        ("trainer.behavior_log_weight_mean_by_age.AGE", "nats", "as `behavior_log_weight_mean`, over these tokens"),
        (
            "trainer.clip_fraction_by_age.AGE",
            "share",
            "of the trained tokens of this age with an advantage: no gradient after clipping",
        ),
        (
            "trainer.cap_fraction_by_age.AGE",
            "share",
            "of the trained tokens of this age with an advantage: w is above the cap",
        ),
        ("trainer.fallen_fraction_by_age.AGE", "share", "as `fallen_fraction_negative`, over the tokens of this age"),
        ("trainer.num_fresh_tokens", "tokens", "trained tokens that the present version sampled"),
        (
            "trainer.mean_logprob_difference",
            "nats",
            "behavior against proximal log-probs of fresh tokens, mean; the two ought to agree",
        ),
        ("trainer.max_logprob_difference", "nats", "behavior against proximal log-probs of fresh tokens, largest"),
        ("trainer.num_interrupted_tokens", "tokens", "trained tokens sampled after an update within their model call"),
        ("trainer.num_interrupted_fresh_tokens", "tokens", "interrupted ones that the present version sampled"),
        ("trainer.mean_interrupted_difference", "nats", "as `mean_logprob_difference`, over the interrupted fresh tokens"),
        ("trainer.max_interrupted_difference", "nats", "as `max_logprob_difference`, over the interrupted fresh tokens"),
        ("trainer.seconds", "seconds", "the trainer spent on the step"),
        ("trainer.seconds_processor", "seconds", "processor time of rank 0 for the step"),
        ("trainer.seconds_proximal", "seconds", "of the step, on proximal log-probs"),
        ("trainer.seconds_forward_backward", "seconds", "of the step, on loss and gradients"),
        ("trainer.seconds_optimizer", "seconds", "of the step, on the optimizer"),
        ("trainer.spot_check_tokens", "tokens", "recomputed before the step to check the servers"),
        ("trainer.mean_spot_difference", "nats", "between log-probs of server and trainer in the spot check, mean"),
        ("trainer.max_spot_difference", "nats", "between log-probs of server and trainer in the spot check, largest"),
        ("trainer.seconds_spot_check", "seconds", "the check took"),
        ("trainer.unchecked_servers", "servers", "without a call that could be recomputed"),
        (OTHER_METRIC, "as reported", "a key of a trainer of one's own; the bundled one has none of this name"),
    ),
    "evaluation": (
        ("step", "step", "after which the evaluation was asked for"),
        ("episodes", "episodes", "evaluated, failed ones included"),
        ("failed", "episodes", "that failed: they have no result"),
        ("failed_episodes.STOP_REASON", "episodes", "that failed, by stop reason"),
        ("success_rate", "share", "of the episodes that did not fail; no key where all did"),
        ("return_mean", "reward", "mean undiscounted return of the same"),
        ("return_std", "reward", "standard deviation of these returns"),
        ("reward_parts.NAME", "reward", "mean of the part NAME of the returns"),
        *_OUTCOMES,
        ("turns_mean", "turns", "per episode"),
        ("output_tokens_mean", "tokens", "sampled per episode"),
        *_SPEAKERS,
        ("limits.STOP_REASON", "episodes", "ended by a limit"),
        ("workflow.NAME", "as recorded", "mean of what `client.record(NAME=...)` recorded"),
        ("min_version", "version", "lowest of the sampled tokens; with `engine.eval_weights: frozen`, the highest, too"),
        ("max_version", "version", "highest of the sampled tokens"),
        ("greedy", "", "whether it sampled at temperature 0"),
        ("seconds", "seconds", "the evaluation took"),
    ),
    "evaluation_skipped": (("step", "step", "that is not evaluated"),),
    "publishing": (("version", "version", "that the servers get; `policy_version` is the one before"),),
    "published": (
        ("version", "version", "that the servers got"),
        ("trainer_digest", "", "of the weights that the trainer published, after its kind: `agentrl:HEX`"),
        ("server_digests", "", "of the weights in each server, by its URL; the same where the kind is the same"),
        ("probe_difference", "nats", "largest on the probe after the update, of any server; null where not measured"),
    ),
    "episode_failed": (
        ("group", "", "number of the group; null for an evaluation"),
        ("episode_id", "", "of the attempt"),
        ("task_id", "", "of its task"),
        ("stop_reason", "", "why the episode ended"),
        ("kind", "", "name of the error's class"),
        ("message", "", "of the error"),
        ("after_turn", "", "the line that raised, where a turn was the last event before"),
    ),
    "dropped_group": (
        ("group", "", "number of the group"),
        ("reason", "", "why it was dropped"),
    ),
    "checkpoint": (
        ("step", "step", "whose weights it holds"),
        ("path", "", "its directory"),
        ("seconds", "seconds", "from its beginning until it was on the disk"),
        ("held_s", "seconds", "for which the trainer did nothing else than write it"),
    ),
    "resumed": (
        ("step", "step", "the last one done before"),
        ("groups_admitted", "groups", "opened before the checkpoint"),
        ("groups_open", "", "numbers of the groups whose episodes run again"),
        ("evaluations_due", "", "steps whose evaluation runs again"),
    ),
    "end": (
        ("error", "", "null, or why the run ended"),
        ("train_steps", "steps", "finished, skipped ones and those of earlier processes included"),
        ("resumed_from_step", "step", "steps of earlier processes"),
        ("skipped_steps", "steps", "that left the weights as they were, by reason"),
        ("max_staleness", "versions", "the bound"),
        ("max_trained_staleness", "versions", "largest staleness of a trained token"),
        ("mean_staleness", "versions", "over all trained tokens"),
        ("episodes", "episodes", "training episodes that ended, each attempt counted"),
        ("groups", "groups", "trained"),
        ("zero_variance_groups", "groups", "whose returns are all equal, of those that were trained"),
        ("dropped_groups", "groups", "by reason"),
        ("failed_episodes", "episodes", "attempts that failed, by stop reason"),
        ("sampled_tokens", "tokens", "evaluations included"),
        ("evaluation_tokens", "tokens", "sampled in evaluations"),
        ("trained_tokens", "tokens", "in the loss of a step that was not skipped"),
        ("wasted_tokens", "tokens", "sampled for training and never trained, by cause; `in_flight`: the run ended first"),
        ("wall_seconds", "seconds", "of this process"),
        ("run_seconds", "seconds", "on the run's clock, earlier processes included"),
        ("trainer_wait_seconds", "seconds", "the trainer waited for groups"),
        ("rollout_wait_seconds", "seconds", "the dispatcher waited for the staleness bound"),
        ("train_seconds", "seconds", "of training"),
        ("sync_seconds", "seconds", "the trainer waited for weights to be published"),
        ("pause_seconds", "seconds", "servers were paused for updates"),
        (
            "max_logprob_difference",
            "nats",
            "largest difference of a behavior log-prob from the trainer's under the same version",
        ),
        ("unchecked_steps", "steps", "before which some server's log-probs could not be compared"),
        ("interrupted_tokens", "tokens", "trained tokens sampled after weights had changed in their model call"),
        (
            "mean_interrupted_difference",
            "nats",
            "between log-probs of interrupted tokens and the trainer's, where it still had their version; mean",
        ),
        ("max_interrupted_difference", "nats", "largest of these differences"),
        ("max_probe_difference", "nats", "largest difference on the probe after an update"),
        ("evaluations", "", "the `evaluation` lines"),
        ("checkpoint", "", "path of the last checkpoint; null where none was written"),
    ),
}

METRIC_KEYS: tuple[MetricKey, ...] = tuple(MetricKey(event, *row) for event, rows in _TABLES.items() for row in rows)
"""Every key of `metrics.jsonl`, in the order of the reference page."""


def find_metric(key: str) -> list[MetricKey]:
    """Return the entries that describe a key, one for each event that has it; exact names come before patterns.

    Example:
        >>> [found.event for found in find_metric("success_rate")]
        ['step', 'evaluation']
    """
    exact = [entry for entry in METRIC_KEYS if entry.key == key]
    return exact or [entry for entry in METRIC_KEYS if entry.covers(key)]


def undocumented(event: str, keys: Iterable[str]) -> list[str]:
    """Return the keys of a line that no entry describes.

    Example:
        >>> undocumented("checkpoint", ["event", "wall_s", "policy_version", "step", "path", "colour"])
        ['colour']
    """
    known = [entry for entry in METRIC_KEYS if entry.event in ("every", event)]
    return [key for key in keys if not any(entry.covers(key) for entry in known)]


def metrics_page() -> str:
    """Return `docs/reference/metrics.md`."""
    return "\n".join(_page_lines()) + "\n"


def _page_lines() -> Iterator[str]:
    yield "# metrics.jsonl, field by field"
    yield ""
    yield "<!-- Written by `python -m agentrl.observe.metric_keys`; edit agentrl/observe/metric_keys.py. -->"
    yield ""
    yield "A run appends JSON lines to `runs/NAME/metrics.jsonl`. The `event` of a line names its kind. A key is missing"
    yield "where there is nothing to report. In a key, a part in capitals stands for a name that the run gives."
    yield "[Trackers](../howto/trackers.md) get the numbers of the `step` and `evaluation` lines."
    for event, when in EVENTS.items():
        yield ""
        yield f"## {when.capitalize()}" if event == "every" else f"## {event}: {when}"
        yield ""
        yield "| key | unit | meaning |"
        yield "|---|---|---|"
        for entry in METRIC_KEYS:
            if entry.event == event:
                yield f"| `{entry.key}` | {entry.unit} | {entry.meaning} |"


if __name__ == "__main__":
    import sys

    sys.stdout.write(metrics_page())
