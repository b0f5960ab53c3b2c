"""The config of a whole run: one YAML file, overridden by flags such as `--trainer.lr 1e-5`.

`RunConfig` composes the config models that live beside their components.

Invariant: a `RunConfig` is consistent, and the chosen backend honours every field that is set. Errors of a file are
reported together, one line each: the field, what was expected, what was got, and how to fix it. A flag's value is read as
the same text in a run file would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from agentrl.algo.config import AlgorithmConfig
from agentrl.client.config import SamplingConfig
from agentrl.config.base import Config, Seed
from agentrl.config.describe import config_fields
from agentrl.config.hints import guess_field
from agentrl.config.names import local_file, local_model, model_file
from agentrl.config.route import Route, idle_fields, route_of, route_problems
from agentrl.config.yaml import NOT_YAML, load_yaml, overridden
from agentrl.data.config import TasksConfig
from agentrl.engine.config import MIN_BFLOAT16_PROBE, ComputeType, EngineConfig
from agentrl.errors import ConfigError
from agentrl.inference.config import InferenceConfig
from agentrl.processes.config import ClusterConfig
from agentrl.rollout.config import RolloutConfig
from agentrl.trainer.config import ParallelConfig, SftConfig, TrainerConfig
from agentrl.weights.config import SyncConfig

_SGLANG_ONLY = ("sglang_python", "sglang_args")
_LAUNCH_ONLY = (*_SGLANG_ONLY, "servers", "host", "device", "max_running_requests", "start_timeout_s")


class ModelConfig(Config):
    """The model to train and serve."""

    path: str
    """Directory or `hf://org/name` of a HF checkpoint: config.json, *.safetensors, tokenizer.json, chat template; or a GGUF
    file, which is imported once into the user's cache."""

    @property
    def local_path(self) -> str | None:
        """The local directory; None where the cache of the hub lacks an `hf://` name, and for a single file."""
        if model_file(self.path) is not None:
            return None
        try:
            return local_file(self.path)
        except ConfigError:
            return None

    @property
    def directory(self) -> str:
        """The local directory, made from a single file; `ConfigError` where the hub's cache lacks it or the file is bad."""
        try:
            return local_model(self.path)
        except ConfigError as error:
            raise ConfigError(f"model.path: {error}") from error


COMMAND_WORKFLOW: Final = "agentrl_workflows.command:CommandWorkflow"
"""The workflow of run files whose `workflow` is a command with its settings."""


class RunConfig(Config):
    """A run: workflow, tasks, model, servers, trainer, algorithm."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory."""
    runs_dir: str = "runs"
    """Directory that holds the run directories."""
    seed: Seed = 0
    """Seed of the order of tasks, of sampling (server n gets `seed + n`) and of the trainer; at most 2**31 - 1."""
    workflow: str
    """`module:Name` of a RolloutWorkflow or of an `async def solve(task, client) -> float`; or `{command: [...], ...}`, an
    agent that is a program of its own, with the fields of `agentrl_workflows.command.CommandSettings`."""
    workflow_args: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Attributes or constructor arguments of the workflow, such as `{max_turns: 6}`."""
    tasks: TasksConfig
    model: ModelConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    inference: InferenceConfig = InferenceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    cluster: ClusterConfig = ClusterConfig()
    sft: SftConfig | None = None
    """The supervised warm start that `agentrl sft` runs; None: there is none."""
    track: tuple[str, ...] = ()
    """Where figures and episodes go, too: tensorboard, wandb, mlflow, opentelemetry, jsonl, `module:Class`."""
    track_project: str = Field(default="agentrl", min_length=1)
    """Project of wandb, experiment of mlflow."""
    track_samples: int = Field(default=3, ge=0)
    """Episodes of each step and each evaluation that trackers get as text: the best, the worst, and others at random."""

    @property
    def run_dir(self) -> Path:
        """Directory for everything that the run writes."""
        return Path(self.runs_dir) / self.name

    @property
    def resolved_inference(self) -> InferenceConfig:
        """`inference`, with the defaults that depend on other sections filled in."""
        given, lora = self.inference, self.trainer.lora
        mode = given.pause_mode or ("pinned" if self.sync.adapter == "adapter" else "exact")
        update: dict[str, object] = {"dtype": given.dtype or self.trainer.dtype, "pause_mode": mode}
        if lora is not None and self.sync.adapter == "adapter" and given.backend == "sglang" and not given.urls:
            count = str(self.served_adapters)
            limits = ["--max-lora-rank", str(lora.rank), "--max-loaded-loras", count, "--max-loras-per-batch", count]
            flags = ("--enable-lora", *limits, "--lora-target-modules", *lora.targets)
            update["sglang_args"] = (*flags, *given.sglang_args)
        return given.model_copy(update=update)

    @property
    def served_adapters(self) -> int:
        """LoRA adapters that a server holds at once: the served one, those of calls in the bound, and the next."""
        return self.algorithm.max_staleness + 2 if self.sync.adapter == "adapter" else 0

    @property
    def max_adapter_lag(self) -> int:
        """Versions that the adapter of a running call may be behind the newest before the call continues with that."""
        return self.algorithm.max_staleness if self.resolved_inference.pause_mode == "pinned" else 0

    @property
    def compute_type(self) -> ComputeType:
        """The coarser one of the types in which servers and trainer compute."""
        return "bfloat16" if "bfloat16" in (self.trainer.dtype, self.resolved_inference.dtype) else "float32"

    def to_yaml(self) -> str:
        """Return the run file of this run: the fields that were given, without the defaults."""
        text = yaml.safe_dump(self.model_dump(mode="json", exclude_unset=True), sort_keys=False, allow_unicode=True)
        if not self.workflow.startswith("<"):
            return text
        return f"# {self.workflow} is a Python object: save it in a module, and set workflow: module:Name\n{text}"

    @property
    def route(self) -> Route:
        """How weights reach the servers."""
        return route_of(self.sync, self.inference, self.trainer, self.engine, elsewhere=self.cluster.launcher == "ray")

    @model_validator(mode="before")
    @classmethod
    def _accept_command(cls, given: object) -> object:
        fields = cast("dict[str, object]", given)
        if not isinstance(given, dict) or not isinstance(fields.get("workflow"), dict):
            return given
        if fields.get("workflow_args"):
            raise ValueError(
                "workflow_args: a workflow that is a command has its settings in workflow; remove workflow_args"
            )
        return {**fields, "workflow": COMMAND_WORKFLOW, "workflow_args": fields["workflow"]}

    @field_validator("track", mode="before")
    @classmethod
    def _accept_one_tracker(cls, given: object) -> object:
        return (given,) if isinstance(given, str) else given

    @field_validator("sync", mode="before")
    @classmethod
    def _accept_sync_method(cls, given: object) -> object:
        return {"method": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _check_consistency(self) -> RunConfig:
        route = route_problems(
            self.sync, self.inference, self.trainer, self.engine, elsewhere=self.cluster.launcher == "ray"
        )
        problems = [*_inference_problems(self.inference), *_training_problems(self), *route]
        if problems:
            raise ValueError("\n".join(problems))
        for source in (self.tasks, *self.tasks.sources, *([self.tasks.eval] if self.tasks.eval else [])):
            source.play_with(self.workflow_args)
        return self


def inapplicable(config: RunConfig) -> list[tuple[str, str]]:
    """Return `(section, field)` of each field that the run's backend or policy cannot honour."""
    found = [("inference", name) for name in _unused(config.inference)] + idle_fields(config.sync)
    return found + ([("rollout", "workers")] if config.rollout.runner == "local" else [])


def _unused(inference: InferenceConfig) -> dict[str, str]:
    """Return the fields that the servers of a run do not use, each with the reason and the fix."""
    why = "applies to launched servers, but inference.urls names running ones; remove one of the two"
    launching: dict[str, str] = dict.fromkeys(_LAUNCH_ONLY if inference.urls else (), why)
    why = f"the {inference.backend} backend cannot honour it; remove it"
    return launching | dict.fromkeys(_SGLANG_ONLY if inference.backend == "embedded" else (), why)


def _inference_problems(inference: InferenceConfig) -> list[str]:
    fields = InferenceConfig.model_fields
    given = {name for name in inference.model_fields_set if getattr(inference, name) != fields[name].default}
    problems = [f"inference.{knob}: {why}" for knob, why in _unused(inference).items() if knob in given]
    if inference.host not in ("127.0.0.1", "localhost", "::1") and inference.api_key_env is None:
        problems.append(f"inference.host: {inference.host} is not loopback; set inference.api_key_env, or host to 127.0.0.1")
    return problems


def _training_problems(config: RunConfig) -> list[str]:
    problems: list[str] = []
    algorithm, rollout, trainer = config.algorithm, config.rollout, config.trainer
    batch = algorithm.group_size * algorithm.groups_per_step
    if config.sampling.temperature == 0:
        problems.append("sampling.temperature: 0 samples greedily, which has no policy gradient; set a positive one")
    if trainer.minibatches > batch:
        problems.append(f"trainer.minibatches: {trainer.minibatches} is more than the {batch} episodes of a batch; lower it")
    if rollout.runner == "local" and rollout.workers != "auto":
        problems.append("rollout.workers: applies to workers; set rollout.runner: processes or ray, or remove it")
    if rollout.runner != "local" and config.workflow.startswith("<"):
        problems.append(
            f"rollout.runner: {rollout.runner}: workers import the workflow by its name, and {config.workflow} was given as "
            "a Python object; save it in a module and pass module:Name, or set rollout.runner: local"
        )
    in_place = trainer.snapshot == "stream" and trainer.dtype == "float32" and trainer.parallel == ParallelConfig()
    if config.engine.overlap_publication and (algorithm.max_staleness == 0 or in_place):
        why = "trainer.snapshot: stream keeps no copy of the weights to send"
        if algorithm.max_staleness == 0:
            why = "algorithm.max_staleness: 0 trains only what the new weights sampled"
        problems.append(
            f"engine.overlap_publication: {why}, so the next batch cannot be trained meanwhile; change one of them"
        )
    stall_s = config.engine.stall_timeout_s
    for what, field, limit_s in (
        ("an episode", "rollout.episode_timeout_s", rollout.episode_timeout_s),
        ("a call to the trainer", "trainer.call_timeout_s", trainer.call_timeout_s),
    ):
        if stall_s <= limit_s:
            problems.append(
                f"engine.stall_timeout_s: {stall_s:g} s is not more than the {limit_s:g} s {what} may take ({field}), so a "
                "slow one would look like a stall; raise it"
            )
    asked, least = config.engine.probe_tolerance, MIN_BFLOAT16_PROBE
    if asked is not None and asked < least and config.compute_type == "bfloat16":
        problems.append(
            f"engine.probe_tolerance: log-probs computed in bfloat16 differ by {least:g} nats and more, which {asked:g} "
            "would call a failed update; raise or remove it, or set trainer.dtype and inference.dtype: float32"
        )
    if config.engine.eval_every and config.tasks.eval is None:
        problems.append("engine.eval_every: there are no held-out tasks; set tasks.eval")
    return problems


def load_config(path: str | Path, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the run that a YAML file and command-line flags describe.

    Args:
        path: the YAML file.
        overrides: command-line flags, such as `["--trainer.lr", "1e-5", "--name=try2"]`; values are YAML.
        defaults: fields at the top that the file may leave out.

    Raises:
        ConfigError: the file cannot be read, or has errors; one line for each error, with the field and the fix.
    """
    file = Path(path)
    try:
        loaded = load_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the run file {file}: {error.strerror}") from error
    except NOT_YAML as error:
        raise ConfigError(f"{file} is not YAML in UTF-8: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file}: expected a mapping of fields at the top, got {type(loaded).__name__}")
    recorded = file.name == "config.yaml" and (file.parent / "metrics.jsonl").is_file()
    values = {**(defaults or {}), **cast("dict[str, Any]", loaded)}
    return parse_config(values, overrides, source=str(file), recorded=recorded)


def parse_config(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "config", recorded: bool = False
) -> RunConfig:
    """Return the run that `values` and command-line flags describe.

    Args:
        values: the content of a run file.
        overrides: command-line flags, such as `["--seed", "3"]`; values are YAML.
        source: names `values` in errors.
        recorded: whether an earlier run, perhaps of an earlier release, recorded `values`.

    Raises:
        ConfigError: one line for each error, with the field and the fix.

    Example:
        >>> values = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}
        >>> run = parse_config(values, ["--seed", "3"])
        >>> run.seed, run.algorithm.group_size
        (3, 8)
    """
    merged = overridden(values, overrides)
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as error:
        from agentrl.config.removed import without_removed  # only a file of an earlier release needs it

        kept = without_removed(merged, source=source, recorded=recorded)
        if kept != merged:
            return parse_config(kept, source=source)
        lines = [line for detail in error.errors(include_url=False) for line in _explain(detail)]
        raise ConfigError(f"{source} is not a valid run:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _explain(detail: ErrorDetails) -> list[str]:
    """Return one line for each problem in a pydantic error: the field, what is wrong, and the fix."""
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        from agentrl.config.short_fields import short_fields  # loads what only the message needs

        known = [field.path for field in [*config_fields(RunConfig), *short_fields()]]
        hint = guess_field(where, known, detail["input"])
        return [f"{where}: there is no such field; {hint}"]
    if detail["type"] == "missing":
        return [f"{where}: required, but missing"]
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "value_error":
        named = (f"{where}.", f"{where}:")  # the message has the field already
        return [line if not where or line.startswith(named) else f"{where}: {line}" for line in message.split("\n")]
    got = detail["input"]
    return [f"{where}: {message[0].lower()}{message[1:]}, got {type(got).__name__} {got!r}"]
