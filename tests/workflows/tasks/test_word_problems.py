"""Word problems have verified answers, repeat for the same arguments, and do not leak between splits."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from agentrl.errors import ConfigError, InvariantError
from agentrl_rewards.extract import boxed
from agentrl_workflows.tasks.word_problems import WORD_LEVELS, verified_answer, word_problems
from agentrl_workflows.tasks.word_templates import TEMPLATES, WordTemplate


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_formula_and_procedure_agree_on_many_draws(template: WordTemplate) -> None:
    rng = random.Random(0)
    answers = {verified_answer(template, template.draw(rng)) for _ in range(100)}
    assert len(answers) > 3


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_the_text_names_every_number(template: WordTemplate) -> None:
    values = template.draw(random.Random(1))
    named = set(re.findall(r"\{(\w+)\}", template.text))
    assert set(values) <= named <= {*values, "a", "b", "things"}


def test_there_are_at_least_five_templates_at_each_level_and_no_name_twice() -> None:
    assert len({template.name for template in TEMPLATES}) == len(TEMPLATES) >= 25
    assert all(count >= 5 for count in Counter(template.level for template in TEMPLATES).values())
    assert {template.level for template in TEMPLATES} == set(WORD_LEVELS)


def test_a_template_whose_two_ways_differ_is_never_used() -> None:
    wrong = WordTemplate("wrong", 1, "{n}?", lambda _: {"n": 3}, lambda v: v["n"], lambda v: v["n"] + 1)
    with pytest.raises(InvariantError, match="the formula gives 3, the check 4"):
        verified_answer(wrong, {"n": 3})


def test_known_problems_have_the_known_answers() -> None:
    known = {
        "heads_and_legs": ({"h": 10, "l": 28}, 4),
        "ages": ({"k": 3, "y": 2, "d": 12}, 4),
        "buses": ({"n": 61, "k": 20}, 4),
        "meeting_again": ({"x": 12, "y": 18}, 36),
        "third_score": ({"x": 10, "y": 20, "m": 20}, 30),
    }
    for template in TEMPLATES:
        if template.name in known:
            values, answer = known[template.name]
            assert verified_answer(template, values) == answer


def test_the_same_arguments_give_the_same_problems_and_another_seed_gives_others() -> None:
    first, again, other = word_problems(count=40), word_problems(count=40), word_problems(count=40, seed=1)
    assert first == again
    assert [task["question"] for task in first] != [task["question"] for task in other]
    assert Counter(task["level"] for task in first).keys() == set(WORD_LEVELS)


def test_splits_share_no_problem_whatever_the_seed_and_the_names() -> None:
    def numbers(split: str, seed: int) -> set[tuple[str, ...]]:
        tasks = word_problems(count=600, seed=seed, split="train" if split == "train" else "held_out")
        return {(task["template"], *re.findall(r"\d+", task["question"])) for task in tasks}

    train = numbers("train", 0) | numbers("train", 1)
    held_out = numbers("held_out", 0) | numbers("held_out", 1)
    assert len(held_out) > 600
    assert train.isdisjoint(held_out)


def test_a_task_has_what_math_workflows_read() -> None:
    for task in word_problems(count=30, levels=[3, 4]):
        assert boxed(task["reference"]) == task["answer"]
        assert task["answer"].isdigit()
        assert "{" not in task["question"]
        assert task["level"] in (3, 4)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"count": 0}, "expected count >= 1"),
        ({"count": 1, "levels": [5]}, "levels of"),
        ({"count": 1, "levels": []}, "levels of"),
        ({"count": 1, "split": "test"}, "expected a split of train or held_out, got 'test'"),
        ({"count": 1, "levels": [1], "templates": ["gift", "ages"]}, "expected templates of"),
        ({"count": 500, "templates": ["share"]}, "different train problems; ask for fewer"),
    ],
)
def test_arguments_that_cannot_be_used_are_explained(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        word_problems(**arguments)
