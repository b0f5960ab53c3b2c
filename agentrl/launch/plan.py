"""What a run will do, in words: weights, tasks, servers, loss, staleness rule, devices, files.

Invariant: the plan is computed from the resolved config alone; printing it starts nothing.
"""

from __future__ import annotations

import yaml

from agentrl.config import RunConfig, inapplicable


def resolved_yaml(config: RunConfig) -> str:
    """Return the whole resolved config, defaults included, as YAML that `agentrl train` reads back to the same run."""
    values = config.model_dump(mode="json")
    # Knobs that do not apply stay out: given, they would be refused.
    for section, name in inapplicable(config):
        del values[section][name]
    return yaml.safe_dump(values, sort_keys=False)


def describe_plan(config: RunConfig) -> str:
    """Return the plan of a run, one aspect a line."""
    rows = [
        ("run", f"{config.name} (seed {config.seed}), files in {config.run_dir}/"),
        ("workflow", f"{config.workflow} {config.workflow_args or ''}".rstrip()),
        ("tasks", _tasks(config)),
        ("weights", _weights(config)),
        ("servers", _servers(config)),
        ("sampling", _sampling(config)),
        ("episodes", _episodes(config)),
        ("batch", _batch(config)),
        ("advantage", _advantage(config)),
        ("loss", _loss(config)),
        ("staleness", _staleness(config)),
        ("updates", _updates(config)),
        ("evaluation", _evaluation(config)),
        ("failures", _failures(config)),
    ]
    return "\n".join(f"{name:<11} {text}" for name, text in rows)


def _tasks(config: RunConfig) -> str:
    tasks = config.tasks
    held_out = tasks.eval_path or (tasks.factory if tasks.eval_factory_args is not None else None)
    return f"{tasks.path or tasks.factory}; held out: {held_out or 'none'}"


def _weights(config: RunConfig) -> str:
    trainer = config.trainer
    return f"{config.model.path}, trained in {trainer.dtype} on {_device(config)}, {trainer.processes} process"


def _device(config: RunConfig) -> str:
    return "CUDA where there is one, else CPU" if config.trainer.device == "auto" else config.trainer.device


def _servers(config: RunConfig) -> str:
    inference = config.inference
    if inference.urls:
        return f"{len(inference.urls)} running {inference.backend} server(s): {', '.join(inference.urls)}"
    where = f"on {inference.host}"
    if inference.backend == "embedded":
        limits = f"{inference.max_running_requests} requests of {inference.max_context_tokens} tokens each"
        return f"{inference.servers} embedded, launched {where}, device {inference.device}, {limits}"
    return f"{inference.servers} SGLang, launched {where} with {inference.sglang_python}"


def _sampling(config: RunConfig) -> str:
    sampling = config.sampling
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, at most {sampling.max_tokens} tokens a call, "
        f"history: {sampling.history}"
    )


def _episodes(config: RunConfig) -> str:
    rollout = config.rollout
    turns = f"{rollout.max_turns} turns" if rollout.max_turns else "turns as the workflow says"
    return f"{rollout.max_concurrent_episodes} at once, {turns}, {rollout.episode_timeout_s:g} s each at most"


def _batch(config: RunConfig) -> str:
    algorithm = config.algorithm
    return (
        f"{algorithm.groups_per_step} groups of {algorithm.group_size} episodes, {config.trainer.minibatches} optimizer "
        f"step(s) a batch, {config.engine.steps} batches"
    )


def _advantage(config: RunConfig) -> str:
    algorithm = config.algorithm
    rule = {
        "episode": "episode return minus group mean, for every token",
        "turn": f"return-to-go of each turn (discount {algorithm.discount:g}) minus the other episodes' mean",
    }[algorithm.advantage]
    return f"{algorithm.advantage}: {rule}{', divided by the group deviation' if algorithm.normalize_std else ''}"


def _loss(config: RunConfig) -> str:
    algorithm = config.algorithm
    clip = f"ratios clipped to [{1 - algorithm.clip_low:g}, {1 + algorithm.clip_high:g}]"
    weight = f"behavior weight always applied, {algorithm.behavior_weight_mode} above {algorithm.behavior_weight_cap:g}"
    return f"decoupled PPO, {clip}, {weight}; AdamW lr {config.trainer.lr:g}"


def _staleness(config: RunConfig) -> str:
    algorithm = config.algorithm
    if algorithm.max_staleness == 0:
        return "0: synchronous; each batch is sampled by the weights it trains"
    rule = {
        "wait": "the trainer waits for groups that would grow too old; nothing is discarded",
        "mask": "older tokens leave the loss, counted",
        "drop": "groups with older tokens are dropped, counted",
    }[algorithm.staleness_policy]
    return (
        f"at most {algorithm.max_staleness} version(s) behind for every trained token; {algorithm.staleness_policy}: {rule}"
    )


def _updates(config: RunConfig) -> str:
    mode = config.inference.pause_mode
    exact = (
        "exact: recorded log-probs equal a recompute" if mode == "retract" else "keeps stale KV: recorded log-probs deviate"
    )
    place = config.engine.publish_dir or f"{config.run_dir}/weights"
    return f"from disk ({place}), checksum and probe compared; pause {mode} ({exact})"


def _evaluation(config: RunConfig) -> str:
    engine = config.engine
    when = (
        f"every {engine.eval_every} steps, {engine.eval_episodes} episodes, beside training" if engine.eval_every else "none"
    )
    saved = f"every {engine.checkpoint_every} steps and at the end" if engine.checkpoint_every else "at the end"
    return f"{when}; checkpoints: {saved}"


def _failures(config: RunConfig) -> str:
    rollout = config.rollout
    group = "dropped" if rollout.incomplete_group == "drop" else f"kept if {rollout.min_group_size} episodes are left"
    limits = f"{rollout.max_failure_rate:.0%} failures or {rollout.max_consecutive_failures} in a row"
    stall = f"{config.engine.stall_timeout_s:g} s without progress"
    return f"{rollout.episode_retries} retry per episode, then the group is {group}; the run stops at {limits}, or {stall}"
