"""A field that does not exist leads to the one that was meant."""

from __future__ import annotations

import pytest

from agentrl.config import RunConfig, parse_config
from agentrl.config.describe import config_fields
from agentrl.config.hints import MISSING, OTHER_WORDS, guess_field
from agentrl.errors import ConfigError

BASE = {"workflow": "my:Agent", "tasks": {"path": "t.jsonl"}, "model": {"path": "m"}}
KNOWN = [field.path for field in config_fields(RunConfig)]


def test_every_word_of_another_framework_leads_to_one_field_that_exists() -> None:
    words = [word for known in (*OTHER_WORDS.values(), *MISSING.values()) for word in known]
    assert [word for word in words if words.count(word) > 1] == []
    assert set(OTHER_WORDS) <= set(KNOWN)
    assert [word for word in words if word in KNOWN] == []


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("trainer.learning_rate", "did you mean trainer.lr?"),
        ("learning_rate", "did you mean trainer.lr?"),
        ("sft.learning_rate", "did you mean sft.lr?"),
        ("trainer.lrr", "did you mean trainer.lr?"),
        ("batch_size", "did you mean algorithm.groups_per_step?"),
        ("algorithm.num_generations", "did you mean algorithm.group_size?"),
        ("trainer.group_size", "did you mean algorithm.group_size?"),
        ("rollout.max_tokens", "did you mean sampling.max_tokens?"),
        ("sampling.max_new_tokens", "did you mean sampling.max_tokens?"),
        ("trainer.steps", "did you mean engine.steps or sft.steps?"),
        ("algorithm.kl_coef", "did you mean algorithm.terms?"),
        ("trainer.zzz", "fields here: betas, "),
        ("trainer.lora_rank", "did you mean trainer.lora"),
        ("trainer.lora.target_modules", "did you mean trainer.lora.targets?"),
        ("trainer.lora.modules_to_save", "servers take linear layers of blocks only"),
        ("trainer.lora.load_in_4bit", "a quantised base is not trained; docs/howto/lora.md"),
        ("algorithm.gae_lambda", "did you mean algorithm.critic"),
    ],
)
def test_a_wrong_name_leads_to_the_field_by_its_full_path(wrong: str, hint: str) -> None:
    assert guess_field(wrong, KNOWN, 1).startswith(hint)


@pytest.mark.parametrize(("section", "fields"), [("trainr", {"x": 1}), ("optim", {"learning_rate": 1e-5})])
def test_a_wrong_section_is_guessed_by_its_name_or_by_what_is_in_it(section: str, fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{section}: there is no such field; did you mean trainer?"):
        parse_config({**BASE, section: fields})


def test_a_flag_is_guessed_as_the_same_field_in_a_file_is() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate: there is no such field; did you mean trainer\.lr\?"):
        parse_config(BASE, ["--trainer.learning-rate", "1e-5"])
