"""What fills no slot is refused with slot, function and fix: when the run file is read, or when the function is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.algo.batch_advantages import batch_advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.engine.filter import load_filter
from agentrl.engine.parts import load_driver_functions
from agentrl.errors import AgentRLError
from tests.algo.build import group, linear

DRIVER_SIDE = """
import numpy as np

def nan(group):
    return [np.full(len(one.turns), np.nan) for one in group.episodes]

def one_short(group):
    return [np.zeros(len(one.turns)) for one in group.episodes[1:]]

def a_number(group):
    return 1.0

def raising(group):
    raise ZeroDivisionError("division by zero")

def maybe(group):
    return "yes"
"""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"policy_loss": "dppo_tv", "correction": {"token": "mask"}},
            r"algorithm\.correction\.token: dppo_tv weighs tokens by current / behavior itself, so mask would count the "
            r"difference twice; set it to none, or choose another policy_loss",
        ),
        (
            {"policy_loss": "topr", "correction": {"sequence": "sequence_truncate"}},
            r"algorithm\.correction\.sequence: topr weighs tokens .* choose another policy_loss",
        ),
        (
            {"policy_loss": "gspo", "behavior_weight_cap": 2.0, "correction": {"token": "icepop"}},
            r"algorithm\.behavior_weight_cap: correction has a part `token` of its own; remove one of the two",
        ),
        (
            {"policy_loss": {"ppo": {"clip_high": 0.3}}, "clip_high": 0.28},
            r"algorithm\.clip_high: policy_loss ppo has clip_high of its own; remove one of the two",
        ),
        (
            {"policy_loss": "reinforce", "clip_low": 0.1},
            r"algorithm\.clip_low: policy_loss reinforce has no option clip_low; remove clip_low, or choose one of ppo",
        ),
        (
            {"policy_loss": {"gspo": {"clip": 1}}},
            r"algorithm\.policy_loss: gspo has no option 'clip'; its options: clip_low",
        ),
        ({"policy_loss": "gpso"}, r"algorithm\.policy_loss: there is no 'gpso'; expected ppo, .* or module:function"),
        ({"terms": ["my_terms:pull"]}, r"algorithm\.terms: my_terms:pull has no weight; give \{my_terms:pull: \{weight"),
        ({"terms": [{"entropy": {"final_weight": 0}}]}, r"algorithm\.terms: entropy: expected final_weight and over_steps"),
        ({"terms": ["entropyy"]}, r"algorithm\.terms: there is no 'entropyy'; expected entropy, "),
        (
            {"terms": [{"my_terms:pull": {"weight": 0.1, "final_weight": 0.0, "over_steps": -1}}]},
            r"algorithm\.terms: my_terms:pull\.over_steps: input should be greater than or equal to 0, got -1",
        ),
        (
            {"terms": [{"kl": {"weight": 0.01, "final_weight": 0.0}}], "reference": {}},
            r"algorithm\.terms: kl: expected final_weight and over_steps together",
        ),
        (
            {"terms": [{"kl": {"final_weight": -1, "over_steps": 4}}], "reference": {}},
            r"algorithm\.terms: kl\.final_weight: input should be greater than or equal to 0, got -1",
        ),
        (
            {"terms": [{"my_terms:pull": {"weight": 0.1, "over_steps": 4}}]},
            r"algorithm\.terms: my_terms:pull: expected final_weight and over_steps together",
        ),
        (
            {"terms": [{"my_terms:pull": {"weight": 0.1, "final_weight": 0.0, "over_steps": 2.5}}]},
            r"algorithm\.terms: my_terms:pull\.over_steps: input should be a valid integer",
        ),
        (
            {"terms": [{"my_terms:pull": float("nan")}]},
            r"algorithm\.terms: my_terms:pull\.weight: input should be a finite number, got nan",
        ),
        (
            {"terms": [{"my_terms:pull": "0.1"}]},
            r"algorithm\.terms: my_terms:pull: expected a number for weight, got '0\.1'",
        ),
        (
            {"advantage": {"pass_at_k": 16}, "group_size": 4},
            r"algorithm\.advantage: pass_at_k grades 16 attempts together, and a group has 4; give a k of at most 4, or "
            r"raise algorithm\.group_size",
        ),
        (
            {"advantage": {"episode": {"group_size": 4}}, "group_size": 8},
            r"algorithm\.advantage: episode has a group_size of 4, and algorithm\.group_size is 8; remove the first",
        ),
        (
            {"correction": {"token": {"icepop": {"low": 5, "high": 0.5}}}},
            r"algorithm\.correction\.token: icepop: expected low below high; between 5 and 0\.5 no token stays",
        ),
        (
            {"correction": {"sequence": {"geometric_mask": {"low": 2, "high": 0.5}}}},
            r"algorithm\.correction\.sequence: geometric_mask: expected low below high",
        ),
        ({"correction": {"token": {"icepop": {"low": 6}}}}, r"icepop: expected low below high; between 6 and 5"),
        (
            {"keep": {"mixed": 1}, "groups_per_step": 2},
            r"algorithm\.keep\.max_groups_per_step: 1 is below algorithm\.groups_per_step, 2, so nothing could be left out",
        ),
        ({"keep": {"all": 64}}, r"algorithm\.keep: all keeps each group, so max_groups_per_step does nothing; remove it"),
        (
            {"policy_loss": {"my_losses:my_gspo": {"dense": "false"}}},
            r"algorithm\.policy_loss: my_losses:my_gspo: expected true or false for dense, got 'false'",
        ),
        ({"keep": {"mixed": {"max_groups_per_step": 0}}}, r"algorithm\.keep\.max_groups_per_step: expected a number of at"),
        ({"aggregate": {"fixed": 0}}, r"expected token, turn, sequence or \{fixed: N\} with N of at least 1"),
        ({"preset": "grpoo"}, r"algorithm\.preset: there is no 'grpoo'; expected areal_boba2, ppo, grpo"),
    ],
)
def test_slots_that_contradict_each_other_or_options_that_do_not_fit_are_refused_when_read(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(fields)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_driver_slots.py").write_text(DRIVER_SIDE)
    (tmp_path / "my_torch_slots.py").write_text("import torch\n\ndef best(group):\n    return torch.zeros(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_driver_slots", raising=False)
    return "my_driver_slots"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", r"algorithm\.advantage: my_driver_slots:nan returned \[nan.* expected finite numbers; look for a division"),
        (
            "one_short",
            r"algorithm\.advantage: my_driver_slots:one_short returned arrays of the shapes .* one number for each",
        ),
        ("a_number", r"algorithm\.advantage: my_driver_slots:a_number returned a float; return a Sequence"),
        ("raising", r"algorithm\.advantage: my_driver_slots:raising raised ZeroDivisionError: .*; fix the function"),
        ("gone", r"algorithm\.advantage: module my_driver_slots has no 'gone'"),
    ],
)
def test_an_advantage_that_fails_is_named_at_the_first_batch(mine: str, name: str, message: str) -> None:
    played = group([linear([1.0]), linear([0.0])])
    with pytest.raises(AgentRLError, match=message):
        batch_advantages([played], AlgorithmConfig(advantage=f"{mine}:{name}"))


@pytest.mark.usefixtures("mine")
def test_a_function_of_the_driver_that_is_not_there_or_imports_torch_is_refused_before_the_run_starts() -> None:
    for fields, message in (
        ({"advantage": "my_torch_slots:best"}, r"algorithm\.advantage: my_torch_slots:best runs in the driver.*use numpy"),
        ({"keep": "my_torch_slots:best"}, r"algorithm\.keep: my_torch_slots:best runs in the driver, which has no torch"),
        ({"keep": "no_such_slots:best"}, r"algorithm\.keep: there is no module 'no_such_slots'; .*put its module into"),
        ({"advantage": {"my_driver_slots:nan": {"k": 2}}}, r"algorithm\.advantage: my_driver_slots:nan has no option 'k'"),
    ):
        config = AlgorithmConfig.model_validate(fields)
        with pytest.raises(AgentRLError, match=message):
            load_filter(config) if "keep" in fields else load_driver_functions(config)


def test_a_keep_function_that_says_neither_yes_nor_no_is_named(mine: str) -> None:
    keeps = load_filter(AlgorithmConfig(keep=f"{mine}:maybe"))
    with pytest.raises(
        AgentRLError, match=r"algorithm\.keep: my_driver_slots:maybe returned a str for group 3; return True"
    ):
        keeps.keeps(group([linear([1.0]), linear([0.0])]), version=1)
