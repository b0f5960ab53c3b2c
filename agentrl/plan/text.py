"""The plan of a run as people read it, one aspect on each line, and its resolved run file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import yaml

from agentrl.algo.config import LR_FACTOR, CriticConfig, ReferenceConfig, preset_differences
from agentrl.algo.presets import PRESETS
from agentrl.config import RunConfig, inapplicable
from agentrl.config.route import Route
from agentrl.config.run import COMMAND_WORKFLOW
from agentrl.data.config import SourceConfig, WeightedSource
from agentrl.data.left_out import LeftOutTask, left_out_rows
from agentrl.data.source import never_ends
from agentrl.engine.config import CHECKPOINT_AGE_S, INTERRUPT_S, MAX_SKIPPED_CHECKS, probe_bounds, spot_bounds
from agentrl.inference.backend import LogprobTolerance
from agentrl.inference.config import first_gpu, runs_on_cpu, tensor_parallel
from agentrl.plan.memory import RunMemory, gib, longest_pass, owns_critic, running_requests, trained_parameters
from agentrl.plan.model import ModelShape
from agentrl.plan.places import num_workers
from agentrl.plan.plan import Plan
from agentrl.plan.splits import DEFAULT_GPU
from agentrl.processes.ray import ray_address
from agentrl.rollout.config import LEAST_KEPT
from agentrl.trainer.parallel.shape import MeshShape, reason_against_sharing

_TERMINAL_COMMAND: Final = "agentrl_workflows.terminal:TerminalCommand"


def resolved_yaml(config: RunConfig) -> str:
    """Return the resolved config with its defaults as YAML; `agentrl train` reads the same run from it."""
    values = config.model_dump(mode="json")
    # Fields that do not apply are left out, because a run file with them is refused.
    for section, name in inapplicable(config):
        del values[section][name]
    return yaml.safe_dump(values, sort_keys=False)


def describe_plan(plan: Plan, remarks: Sequence[str] = (), left_out: Sequence[LeftOutTask] = ()) -> str:
    """Return the plan of a run, one aspect on each line.

    It has what the workflow remarks on the tasks, and the tasks that are left out since they cannot be read.
    """
    config = plan.run
    rows = [
        ("run", f"{config.name} (seed {config.seed}), files in {config.run_dir}/"),
        ("workflow", f"{config.workflow} {config.workflow_args or ''}".rstrip()),
        ("tasks", _tasks(config)),
        *(("", remark) for remark in remarks),
        *(_left_out(left_out) if left_out else []),
        ("weights", _weights(config)),
        ("servers", _servers(config)),
        *([("cluster", _ray_cluster(config))] if config.cluster.launcher == "ray" else []),
        *_prefixes(plan),
        *_split(plan),
        *_memory(plan),
        ("sampling", sampling_line(config)),
        ("episodes", _episodes(config)),
        *_preset(config),
        ("batch", _batch(config)),
        *([] if config.algorithm.slots.shaping.name == "none" else [("shaping", _shaping(config))]),
        ("advantage", _advantage(config)),
        ("loss", _loss(config)),
        *([] if config.algorithm.critic is None else [("critic", _critic(config, config.algorithm.critic))]),
        *([] if config.algorithm.reference is None else [("reference", _reference(config.algorithm.reference))]),
        ("staleness", _staleness_rule(config)),
        ("updates", _updates(config, plan.route, plan.memory)),
        ("evaluation", _evaluation(config)),
        ("failures", _failures(config)),
        *([("trackers", _trackers(config))] if config.track else []),
    ]
    return "\n".join(f"{name:<11} {text}" for name, text in rows)


def _left_out(left_out: Sequence[LeftOutTask]) -> list[tuple[str, str]]:
    return [("" if number else "left out", row) for number, row in enumerate(left_out_rows(left_out))]


def _prefixes(plan: Plan) -> list[tuple[str, str]]:
    trainer, model = plan.run.trainer, plan.model
    if not model.architecture or trainer.shared_prefixes == "off":
        return []
    cp = trainer.parallel.shape.cp
    reason = reason_against_sharing(model.architecture, has_windows=model.has_windows, cp=cp)
    if reason is None:
        return []
    return [("prefixes", f"trainer.shared_prefixes: auto changes nothing here, because {reason}")]


def _split(plan: Plan) -> list[tuple[str, str]]:
    if plan.split is None:
        return []
    cluster, split, splits = plan.run.cluster, plan.split, plan.splits
    after = {"off": "", "advise": "; the end of the run advises", "at_restart": "; a resumed run corrects it"}
    row = ("split", f"{split} of {cluster.gpus}{after[cluster.resize]}")
    if not splits:
        return [row]
    best = [*(one for one in splits if one.split == split), *(one for one in splits if one.split != split)][:3]
    times = "; ".join(f"{one.split}: {one.rollout_s:.3g} s of rollouts, {one.train_s:.3g} s of training" for one in best)
    source = f"data sheet of the {plan.gpu or DEFAULT_GPU}{'' if plan.gpu else ', as the GPU is unknown'}"
    return [row, ("", f"formula, for a step, by the {source}: {times}")]


def _memory(plan: Plan) -> list[tuple[str, str]]:
    run, memory, shape = plan.run, plan.memory, plan.model.shape
    if memory is None or shape is None:
        reason = "its layers are not alike, or config.json lacks their sizes"
        return [("memory", f"unknown for this {plan.model.architecture} model: {reason}")] if plan.model.architecture else []
    rows = [("memory", _trainer_memory(run, memory, shape)), ("", _checkpoint_memory(run, memory.checkpoint))]
    if not run.inference.urls:
        server = memory.server
        room = f"a cache in which no request waits holds {server.kv_tokens} tokens and takes {gib(server.kv_wanted)} GiB"
        cached = f"{server.kv_per_token / 1024:.1f} KiB of KV cache per token"
        held = f", {gib(server.adapters)} GiB of at most {run.served_adapters} adapters" if server.adapters else ""
        each = f"each server: {gib(server.weights)} GiB of weights{held} and {cached}"
        ways = tensor_parallel(run.inference)
        rows.append(("", f"{each}{f', on each of its {ways} GPUs' if ways > 1 else ''}; {room}"))
        if server.peak is not None:
            rows.append(("", f"each server at most about {gib(server.peak)} GiB of this machine: {_peak(run)}"))
        if plan.shared_gpus:
            least = gib(memory.trainer.total + server.fixed)
            bound = "limit the server with inference.sglang_args: [--mem-fraction-static, share of the GPU]"
            where = f"trainer and server share GPU {plan.shared_gpus[0]}"
            rows.append(("", f"{where}: {least} GiB before the first cached token; {bound}"))
    if plan.model.caps_attention:
        rows.append(
            ("", "without the scores of attention, which are capped, so no kernel spares them: heads x length squared")
        )
    return [*rows, ("", memory.snapshot.row(run.trainer))]


def _peak(run: RunConfig) -> str:
    if run.sync.adapter == "adapter":
        return "with a full cache, whose spare rows keep prefixes"
    return "with a full cache, whose spare rows keep prefixes, while the weights of an update are read and copied"


def _trainer_memory(run: RunConfig, memory: RunMemory, shape: ModelShape) -> str:
    trainer, mesh = memory.trainer, run.trainer.parallel.shape
    states = f"weights {gib(trainer.weights)} + gradients {gib(trainer.gradients)} + AdamW {gib(trainer.optimizer)}, float32"
    if run.trainer.lora is not None:
        adapted = trained_parameters(run.trainer, shape)
        moments = f"gradients {gib(trainer.gradients)} + AdamW {gib(trainer.optimizer)}"
        base = f"base and adapter {gib(trainer.weights)}, the base in {run.trainer.dtype}"
        states = f"{base} + {moments} of {adapted / 1e6:.2f}e6 parameters of the adapter"
    copies = f"; gathered {gib(trainer.copies)} + gradients before they are split {gib(trainer.reduced)}"
    copies = copies if trainer.copies else ""
    tokens = -(-longest_pass(run.trainer, run.inference.context_limit) // mesh.cp)
    batch = f"activations of {tokens} tokens {gib(trainer.activations)}; logits {gib(trainer.logits)}"
    batch += f"; {_beside(run)} {gib(trainer.beside)}" if trainer.beside else ""
    experts = ", each layer gathered with all its experts" if shape.experts else ""
    count = f"{shape.num_parameters / 1e9:.2f}e9 parameters{experts}"
    each_process = "each trainer process" if mesh.world > 1 else "trainer"
    return f"{each_process} about {gib(trainer.total)} GiB for {count}: {states}{copies}; {batch}"


def _beside(run: RunConfig) -> str:
    """Return the models of their own beside the policy, in words."""
    critic = ["a critic of its own"] if owns_critic(run.algorithm) else []
    return " and ".join(critic + ([] if run.algorithm.reference is None else ["a reference"]))


def _checkpoint_memory(run: RunConfig, each: int) -> str:
    world = run.trainer.parallel.shape.world
    row = "host memory for the copy of a checkpoint while it is written:"
    if world == 1:
        return f"{row} {gib(each)} GiB"
    if run.cluster.launcher != "local":
        return f"{row} {gib(each)} GiB for each of {world} trainer processes on their machines"
    return f"{row} {gib(each * world)} GiB, {gib(each)} GiB for each of {world} trainer processes"


def _tasks(config: RunConfig) -> str:
    tasks = config.tasks
    sources = ", ".join(_source(source) + _share(source.weight, tasks.training) for source in tasks.training)
    order = f"; curriculum {tasks.curriculum}" if tasks.curriculum else "" if tasks.shuffle else "; in their own order"
    skipped = f"; solved and hopeless tasks sit out {tasks.skip_passes} passes" if tasks.skip_passes else ""
    return f"{sources}{order}{skipped}; held out: {'none' if tasks.eval is None else _source(tasks.eval)}"


def _source(source: SourceConfig) -> str:
    mapped = f" mapped by {source.map}" if source.map else ""
    kept = f" where {', '.join(f'{name} is {value}' for name, value in source.filter.items())}" if source.filter else ""
    count = f", the first {source.limit}" if source.limit else ", endless" if never_ends(source) else ""
    return f"{source.origin}{mapped}{kept}{count}"


def _share(weight: float, sources: Sequence[WeightedSource]) -> str:
    return "" if len(sources) == 1 else f" ({weight / sum(source.weight for source in sources):.0%})"


def _weights(config: RunConfig) -> str:
    trainer = config.trainer
    local = config.model.local_path
    at = f" at {local}" if local not in (None, config.model.path) else ""
    processes = _trainer_processes(trainer.parallel.shape)
    what = "trained"
    if trainer.lora is not None:
        what = f"frozen; a LoRA adapter of rank {trainer.lora.rank} on {', '.join(trainer.lora.targets)} trained"
    elif trainer.trainable is not None:
        what = f"those that match {trainer.trainable!r} trained"
    return f"{config.model.path}{at}, {what} in {trainer.dtype} on {_device(config)}, {processes}"


def _trainer_processes(shape: MeshShape) -> str:
    if shape.world == 1:
        return "1 process"
    parts = f"1/{shape.shards * shape.tp} of the weights" if shape.shards * shape.tp > 1 else "a copy of the weights"
    return f"{shape.world} processes ({shape}), each with {parts}"


def _device(config: RunConfig) -> str:
    return "CUDA if there is a device, else the CPU" if config.trainer.device == "auto" else config.trainer.device


def _servers(config: RunConfig) -> str:
    inference = config.inference
    if inference.urls:
        return f"{len(inference.urls)} running {inference.backend} server(s): {', '.join(inference.urls)}"
    name = "embedded" if inference.backend == "embedded" else "SGLang"
    running = running_requests(inference)
    requests = "as many requests as fit" if running is None else f"{running} requests"
    context = f"{inference.context_limit} tokens" if inference.context_limit else "up to the model's positions"
    limits = f"{requests} of {context}, {config.resolved_inference.dtype}"
    if config.cluster.launcher == "ray":
        return f"{inference.servers} {name}, placed by Ray, device {inference.device}, {limits}"
    return f"{inference.servers} {name}, launched on {inference.host}, {_server_device(config)}, {limits}"


def _ray_cluster(config: RunConfig) -> str:
    address, ranks = ray_address(config.cluster), config.trainer.parallel.shape.world
    each = {"cpu": "a core", "auto": "a GPU, where the cluster has any,"}.get(config.trainer.device, "a GPU")
    placed = f"places {ranks} trainer rank(s), with {each} each, and the servers"
    if address == "local":
        return f"a Ray cluster that starts on this machine for the run (cluster.address names another one) {placed}"
    source = "cluster.address" if config.cluster.address else "$RAY_ADDRESS"
    return f"Ray at {address} ({source}) {placed}"


def _server_device(config: RunConfig) -> str:
    inference = config.inference
    if inference.backend == "embedded":
        return f"device {inference.device}"
    if runs_on_cpu(inference):
        return "on the CPU" + (", as there is no GPU" if inference.device == "auto" else "")
    ways = tensor_parallel(inference)
    gpus = [first_gpu(inference, index) + way for index in range(inference.servers) for way in range(ways)]
    return f"on GPU {', '.join(map(str, gpus))}" + (f", {ways} each" if ways > 1 else "")


def sampling_line(config: RunConfig) -> str:
    """Return what the plan says of the sampling of model calls."""
    sampling = config.sampling
    if sampling.of_programs == "program":
        programs = "; programs over HTTP choose their own (sampling.of_programs), and calls at temperature 0 are not trained"
    elif config.workflow in (COMMAND_WORKFLOW, _TERMINAL_COMMAND):
        programs = "; the same for the program, whatever it sends (sampling.of_programs)"
    else:
        programs = ""
    biased = "" if sampling.top_p == 1 else " (truncated: log-probs stay those of the whole distribution, a bias)"
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}{biased}, "
        f"at most {sampling.max_tokens} tokens a call, history: {sampling.history}{programs}"
    )


def _episodes(config: RunConfig) -> str:
    rollout = config.rollout
    turns = f"at most {rollout.max_turns} turns" if rollout.max_turns else "turns unlimited by the run file"
    where = "" if rollout.runner == "local" else f", in {num_workers(rollout)} worker(s) ({rollout.runner})"
    return f"{rollout.max_concurrent_episodes} at once{where}, at most {rollout.episode_timeout_s:g} s each, {turns}"


def _batch(config: RunConfig) -> str:
    algorithm, slots, trainer = config.algorithm, config.algorithm.slots, config.trainer
    steps = trainer.minibatches * trainer.epochs
    most = "" if slots.max_groups_per_step is None else f", {slots.max_groups_per_step} played for a batch at most"
    kept = "" if slots.keep.name == "all" else f" ({slots.keep.formula}{most})"
    epochs = "" if trainer.epochs == 1 else f" in {trainer.epochs} passes"
    return (
        f"{algorithm.groups_per_step} groups of {algorithm.group_size} episodes{kept}, {steps} optimizer step(s) a "
        f"batch{epochs}, {config.engine.steps} batches"
    )


def _preset(config: RunConfig) -> list[tuple[str, str]]:
    """Return the source of a preset, and each difference from it on a line of its own."""
    name = config.algorithm.preset_name
    if name is None:
        return []
    lines = preset_differences(config.algorithm, config.trainer.minibatches * config.trainer.epochs)
    return [("preset", f"{name}: {PRESETS[name].source}"), *(("", f"differs: {line}") for line in lines)]


def _shaping(config: RunConfig) -> str:
    slot = config.algorithm.slots.shaping
    return f"{slot.name}: {slot.formula}"


def _advantage(config: RunConfig) -> str:
    slot = config.algorithm.slots.advantage
    scale = {
        "none": "",
        "group": ", over its root mean square in the group",
        "batch": ", over its root mean square in the batch",
        "running": ", over its root mean square in all batches so far",
    }[config.algorithm.normalize]
    return f"{slot.name}: {slot.formula}{scale}"


def _loss(config: RunConfig) -> str:
    slots, trainer = config.algorithm.slots, config.trainer
    passes = f"{trainer.minibatches * trainer.epochs} optimizer step(s) around {slots.proximal.formula}"
    if trainer.minibatches * trainer.epochs == 1 and slots.recomputes_proximal:
        passes = "1 minibatch: r is always 1 and clipping never acts"
    guard = "" if slots.guard.name == "none" else f" * {slots.guard.formula}"
    return f"{slots.formula}; {passes}; AdamW lr {trainer.lr:g}{guard}"


def _critic(config: RunConfig, critic: CriticConfig) -> str:
    kind = {
        "head": "a linear head on the policy's hidden states, which it leaves alone",
        "trunk": "a linear head on the policy, whose weights its loss trains too",
        "own": "a second copy of the model with a head",
    }[critic.model]
    lr = f"AdamW lr {critic.lr or LR_FACTOR * config.trainer.lr:g}"
    alone = f"; alone in the first {critic.warmup_steps} batches" if critic.warmup_steps else ""
    return f"{kind}; {lr}{alone}"


def _reference(reference: ReferenceConfig) -> str:
    every = reference.refresh_every
    weights = f"the weights of every {every}th batch" if every else "the weights that the run begins with"
    paid = (
        f"; a turn pays {reference.reward_weight:g} * KL (estimator {reference.reward_k})" if reference.reward_weight else ""
    )
    return weights + paid


def _staleness_rule(config: RunConfig) -> str:
    algorithm = config.algorithm
    if algorithm.max_staleness == 0:
        return "0: synchronous; each batch trains the weights that sampled it"
    rule = {
        "wait": "the trainer waits for groups that would become too old; nothing is discarded",
        "mask": "older tokens are counted and left out of the loss",
        "drop": "groups with older tokens are counted and dropped",
    }[algorithm.staleness_policy]
    return (
        f"at most {algorithm.max_staleness} version(s) behind for every trained token; {algorithm.staleness_policy}: {rule}"
    )


def _updates(config: RunConfig, route: Route, memory: RunMemory | None) -> str:
    mode = config.resolved_inference.pause_mode or "exact"
    meaning = {
        "exact": "recorded log-probs equal a recompute",
        "fast": "keeps stale KV: recorded log-probs deviate; the metrics report by how much",
        "pinned": f"none: calls keep their adapter for {config.max_adapter_lag} updates; log-probs equal a recompute",
    }[mode]
    sync = route.sync
    way = f"from disk ({config.engine.publish_dir or f'{config.run_dir}/weights'})"
    if route.method == "distributed":
        backend = "nccl where both ends are on GPUs, else gloo" if sync.backend == "auto" else sync.backend
        way = f"from the trainer's memory ({backend}, {sync.bucket_mb} MB at a time, trainer at {sync.address})"
    if config.sync.adapter == "adapter":
        if mode == "exact":
            meaning = "none: calls are aborted and continue with the new adapter; log-probs equal a recompute"
        size = "" if memory is None else f", {memory.snapshot.num_bytes / 2**20:.1f} MiB"
        way = f"the adapter alone{size}, under a name for each version, {way}"
    elif config.trainer.lora is not None:
        way = f"base and adapter merged, {way}"
    engine = config.engine
    when, often = "", "before each step,"
    if engine.overlap_publication:
        when, often = "; the next batch is trained meanwhile", f"before each step, or every {MAX_SKIPPED_CHECKS + 1}th,"
    checks = (
        f"checksum compared, probe within {_tolerance(probe_bounds(engine, config.compute_type))}; {often} log-probs of "
        f"every server recomputed, within {_tolerance(spot_bounds(engine, config.compute_type))}"
    )
    return f"{way}, {route.reason}{when}; {checks}; pause {mode} ({meaning})"


def _tolerance(tolerance: LogprobTolerance) -> str:
    parts = [
        *([] if tolerance.largest is None else [f"{tolerance.largest:g} nats"]),
        *([] if tolerance.mean is None else [f"{tolerance.mean:g} nats on average"]),
        *([] if tolerance.tail is None else [f"{tolerance.tail:g} nats at the 99th percentile"]),
    ]
    return " and ".join(parts)


def _evaluation(config: RunConfig) -> str:
    engine = config.engine
    weights = {
        "live": "beside training, which changes the weights meanwhile",
        "frozen": "of one version: the next one waits for their end",
    }[engine.eval_weights]
    when = f"every {engine.eval_every} steps, {engine.eval_episodes} episodes, {weights}"
    if not engine.eval_every:
        idle = "none: the held-out tasks are played by `agentrl eval` alone, until engine.eval_every is set"
        when = "none" if config.tasks.eval is None else idle
    often = [f"every {engine.checkpoint_every} steps"] if engine.checkpoint_every else []
    saved = (
        ", ".join([*often, f"every {CHECKPOINT_AGE_S:g} s", "at the end"]) + f", on an interrupt within {INTERRUPT_S:g} s"
    )
    return f"{when}; checkpoints: {saved}, the newest {engine.keep_checkpoints} are kept"


def _trackers(config: RunConfig) -> str:
    episodes = (
        f"with {config.track_samples} episodes of each step and evaluation" if config.track_samples else "figures only"
    )
    return f"{', '.join(config.track)}, project {config.track_project}, {episodes}"


def _failures(config: RunConfig) -> str:
    rollout = config.rollout
    group = "dropped" if rollout.incomplete_group == "drop" else f"kept if {LEAST_KEPT} episodes are left"
    limits = f"{rollout.max_failure_rate:.0%} failures or {rollout.max_consecutive_failures} in a row"
    stall = f"{config.engine.stall_timeout_s:g} s without progress"
    retries = f"{rollout.episode_retries} retry per episode, then the group is {group}"
    reached = (
        "a turn, token or context limit, or a deadline that the policy reaches by taking turns, completes an episode with "
        "the workflow's limit_reward (0.0 unless it sets one)"
    )
    return f"{retries}; {reached}; the run stops at {limits}, or after {stall}"
