"""What someone probably meant by a field that does not exist.

Invariant: a guess is a field that exists, named by its full path. A word that other frameworks use is looked up first, then
the same name in another section, then names that are spelled alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

OTHER_WORDS: Mapping[str, tuple[str, ...]] = {
    "name": ("exp_name", "experiment_name", "run_name", "trial_name"),
    "runs_dir": ("log_dir", "output_dir", "save_dir", "work_dir"),
    "seed": ("random_seed",),
    "workflow": ("agent", "env", "environment"),
    "workflow_args": ("agent_args", "env_args", "env_kwargs"),
    "model.path": ("actor_model", "base_model", "model_name", "model_name_or_path", "model_path", "pretrained"),
    "tasks.path": ("data", "dataset", "dataset_path", "prompt_data", "train_data", "train_file", "train_files"),
    "tasks.eval.path": ("eval_data", "eval_file", "test_data", "test_file", "val_data", "val_files", "valid_data"),
    "sampling.max_tokens": (
        *("generate_max_len", "max_completion_length", "max_completion_tokens", "max_new_tokens", "max_output_tokens"),
        *("max_response_length", "max_response_len", "response_length"),
    ),
    "sampling.temperature": ("temp",),
    "sampling.top_p": ("nucleus", "topp"),
    "sampling.template_options": ("chat_template_kwargs", "enable_thinking"),
    "rollout.max_concurrent_episodes": (
        *("concurrency", "max_concurrency", "max_concurrent", "max_concurrent_rollouts", "num_workers"),
    ),
    "rollout.episode_timeout_s": ("episode_timeout", "rollout_timeout", "timeout"),
    "rollout.max_turns": ("max_assistant_turns", "max_episode_steps", "max_iterations", "num_turns"),
    "inference.backend": ("engine_type", "inference_engine", "rollout_backend", "server_type"),
    "inference.urls": ("base_url", "endpoint", "server_url", "server_urls", "url"),
    "inference.servers": ("data_parallel_size", "dp_size", "n_servers", "num_engines", "num_servers"),
    "inference.sglang_args": ("gpu_memory_utilization", "mem_fraction_static", "tensor_parallel_size", "tp_size"),
    "inference.max_context_tokens": (
        *("context_length", "max_length", "max_model_len", "max_prompt_length", "max_seq_len", "max_seq_length"),
    ),
    "algorithm.group_size": (
        *("group_num", "n", "n_samples", "n_samples_per_prompt", "num_generations", "num_rollouts", "num_samples"),
        *("responses_per_prompt", "rollout_n", "rollouts_per_example", "samples_per_prompt"),
    ),
    "algorithm.groups_per_step": (
        *("batch_size", "global_batch_size", "prompts_per_step", "rollout_batch_size", "train_batch_size"),
    ),
    "algorithm.advantage": (
        *("adv_estimator", "advantage_estimator", "advantage_type", "adv_norm", "norm_adv", "normalize_advantages"),
        *("discount_factor", "gamma", "scale_rewards", "whiten_advantages"),
    ),
    "algorithm.max_staleness": (
        *(
            "async_level",
            "max_async_level",
            "max_head_offpolicyness",
            "max_off_policy_steps",
            "off_policy_steps",
            "staleness",
        ),
    ),
    "algorithm.policy_loss": (
        *("clip_eps", "clip_epsilon", "clip_range", "clip_ratio", "clip_ratio_low", "cliprange", "eps_clip", "epsilon"),
        *("clip_higher", "clip_ratio_high", "eps_clip_high", "eps_clip_higher", "epsilon_high", "loss_mode", "loss_type"),
        *("importance_sampling_level", "policy_loss_fn"),
    ),
    "algorithm.correction": (
        *("behav_imp_weight_cap", "is_cap", "rollout_is_threshold", "tis_cap", "tis_imp_ratio_cap"),
        "rollout_is",
    ),
    "algorithm.terms": (
        *("beta", "init_kl_coef", "kl_beta", "kl_coef", "kl_coeff", "kl_ctl", "kl_loss_coef", "kl_penalty", "ref_model"),
        *("ent_coef", "entropy_coef", "entropy_coeff", "entropy_loss_coef"),
    ),
    "algorithm.critic": ("critic_lr", "gae_lambda", "value_lr", "vf_coef"),
    "algorithm.aggregate": ("loss_agg_mode", "loss_aggregation"),
    "algorithm.keep": ("dynamic_sampling", "filter_groups", "max_num_gen_batches"),
    "trainer.lr": ("actor_lr", "learning_rate", "max_lr", "peak_lr"),
    "trainer.betas": ("adam_beta1", "adam_beta2", "adam_betas"),
    "trainer.weight_decay": ("wd",),
    "trainer.warmup_steps": ("lr_warmup_steps", "num_warmup_steps", "warmup", "warmup_ratio"),
    "trainer.schedule": ("lr_schedule", "lr_scheduler", "lr_scheduler_type", "scheduler"),
    "trainer.max_grad_norm": ("clip_grad", "clip_grad_norm", "grad_clip", "gradient_clipping", "max_norm"),
    "trainer.minibatches": ("mini_batch_size", "ppo_mini_batch_size", "ppo_n_minibatches"),
    "trainer.epochs": ("num_iterations", "ppo_epochs"),
    "trainer.microbatch_tokens": (
        *("gradient_accumulation_steps", "max_tokens_per_mb", "micro_batch_size", "per_device_train_batch_size"),
        *("ppo_max_token_len_per_gpu", "ppo_micro_batch_size"),
    ),
    "trainer.dtype": ("bf16", "fp16", "mixed_precision", "precision", "torch_dtype"),
    "trainer.gradient_checkpointing": ("activation_checkpointing", "enable_gradient_checkpointing"),
    "trainer.lora": ("lora_alpha", "lora_config", "lora_r", "lora_rank", "peft", "peft_config", "use_lora"),
    "trainer.lora.targets": ("lora_target_modules", "target_modules"),
    "trainer.parallel.dp": ("fsdp_size", "processes", "nproc_per_node", "num_gpus", "world_size"),
    "trainer.parallel.tp": ("tensor_model_parallel_size", "tensor_parallel"),
    "trainer.parallel.cp": ("context_parallel_size", "cp_size", "sequence_parallel_size", "sp_size", "ulysses"),
    "trainer.parallel.replicate": ("ddp_size", "dp_replicate", "hsdp"),
    "engine.steps": (
        *("epochs", "max_steps", "num_epochs", "num_steps", "num_train_epochs", "num_train_steps", "total_epochs"),
        *("total_steps", "total_train_steps", "total_training_steps", "train_steps", "training_steps"),
    ),
    "engine.eval_every": ("eval_freq", "eval_interval", "eval_steps", "test_freq", "val_interval"),
    "engine.eval_episodes": ("eval_samples", "eval_size", "num_eval_examples"),
    "engine.checkpoint_every": ("checkpoint_interval", "save_every", "save_freq", "save_interval", "save_steps"),
    "engine.keep_checkpoints": ("max_ckpt_num", "max_to_keep", "save_total_limit"),
    "sync.method": ("weight_sync", "weight_update_mode"),
}
"""Words of other frameworks, by the field of agentrl that does the same."""

MISSING: Mapping[str, tuple[str, ...]] = {
    "servers take linear layers of blocks only, and no whole layers; choose trainer.lora.targets": (
        *("embedding_size", "modules_to_save", "train_embeddings"),
    ),
    "a quantised base is not trained; docs/howto/lora.md says what is missing": (
        *("bnb_4bit_compute_dtype", "load_in_4bit", "load_in_8bit", "qlora", "quantization", "quantization_config"),
    ),
    "the workflow's `run` returns the reward": (
        "reward_fn",
        "reward_func",
        "reward_funcs",
        "reward_function",
        "reward_model",
    ),
}
"""Words of other frameworks for what a run file does not have, by what to do instead."""


def guess_field(wrong: str, known: Sequence[str], value: object = None) -> str:
    """Return a hint for a dotted path that names no field.

    Args:
        wrong: what was written, such as `trainer.learning_rate`.
        known: the paths of all fields and sections.
        value: what was given for it; the names inside a mapping help to guess a section.

    Example:
        >>> guess_field("trainer.learning_rate", ["trainer", "trainer.lr"])
        'did you mean trainer.lr?'
        >>> guess_field("trainer.zzz", ["trainer", "trainer.lr"])
        'fields here: lr'
    """
    section, _, name = wrong.rpartition(".")
    if isinstance(value, Mapping):
        inner = [f"{wrong}.{key}" for key in value]  # pyright: ignore[reportUnknownVariableType]
        guesses = [found for path in inner for found in _guesses(path, known)[:1]]
        sections = _alike(name, [path for path in known if "." not in path]) or [g.partition(".")[0] for g in guesses]
        return f"did you mean {sections[0]}?" if sections else _fields_of_section("", known)
    reason = next((why for why, words in MISSING.items() if name in words), None)
    guesses = _guesses(wrong, known)
    if guesses:
        return f"did you mean {' or '.join(guesses[:2])}?"
    return reason or _fields_of_section(section, known)


def _guesses(wrong: str, known: Sequence[str]) -> list[str]:
    section, _, name = wrong.rpartition(".")
    here = [path for path in known if path.rpartition(".")[0] == section]
    translated = [
        _in_section(section, path, known) for path, words in OTHER_WORDS.items() if name in words and path in known
    ]
    same = [path for path in known if path.rpartition(".")[2] == name]
    local = _alike(name, here, cutoff=0.75)
    if local or translated or same:
        return list(dict.fromkeys([*local, *translated, *sorted(same, key=lambda path: path.startswith("sft."))]))
    return _alike(name, here) or ([] if _has_no_field(name) else _alike(name, known, cutoff=0.8))


def _in_section(section: str, path: str, known: Sequence[str]) -> str:
    """Return the field of `section` that is called like `path`, or else `path`."""
    here = f"{section}.{path.rpartition('.')[2]}"
    return here if here in known else path


def _has_no_field(name: str) -> bool:
    return any(name in words for words in MISSING.values())


def _alike(name: str, paths: Sequence[str], cutoff: float = 0.6) -> list[str]:
    """Return the paths whose last part is spelled like `name`, the closest first."""
    by_name: dict[str, list[str]] = {}
    for path in paths:
        by_name.setdefault(path.rpartition(".")[2], []).append(path)
    return [path for close in difflib.get_close_matches(name, by_name, n=2, cutoff=cutoff) for path in by_name[close]][:2]


def _fields_of_section(section: str, known: Sequence[str]) -> str:
    here = sorted(path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == section)
    return f"fields here: {', '.join(here)}"
