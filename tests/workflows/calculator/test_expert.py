"""The demonstrator: honest about its noise, fixed by its seed, and never on held-out questions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from agentrl_envs.calculator import BUSY, WRONG, CalculatorEpisode, calculator_tasks, is_held_out
from agentrl_workflows.calculator.expert import Demonstrator, demonstrate, demonstrations
from agentrl_workflows.calculator.recipe import FULL, SMOKE, CalculatorRecipe

SKILLED = Demonstrator(p_guess=0, p_give_up=0, p_slip=0, p_bad_call=0, p_misread=0, p_busy=0)


def outcomes(demonstrator: Demonstrator, count: int = 2000) -> list[CalculatorEpisode]:
    rng = random.Random(0)
    return [demonstrate(task, demonstrator, rng)[1] for task in calculator_tasks(count=count, seed=2)]


def share(values: list[bool]) -> float:
    return sum(values) / len(values)


def test_without_noise_it_always_succeeds_at_once():
    assert all(episode.reward == 1.0 for episode in outcomes(SKILLED, 500))


def test_its_most_likely_first_action_is_a_wrong_guess():
    conversations = demonstrations(count=2000, seed=0, demonstrator=FULL.demonstrator)
    guesses = [not each["messages"][1].get("tool_calls") for each in conversations]
    assert share(guesses) == pytest.approx(FULL.demonstrator.p_guess, abs=0.03)
    told_wrong = [len(each["messages"]) > 2 for each, guess in zip(conversations, guesses, strict=True) if guess]
    assert share(told_wrong) > 0.95


def test_a_guess_after_a_wrong_guess_is_just_as_likely():
    conversations = demonstrations(count=2000, seed=0, demonstrator=FULL.demonstrator)
    second = [
        "tool_calls" not in each["messages"][3]
        for each in conversations
        if len(each["messages"]) > 3 and each["messages"][2]["content"] == WRONG
    ]
    assert share(second) == pytest.approx(FULL.demonstrator.p_guess, abs=0.04)


def test_success_rates_are_those_the_recipe_was_chosen_for():
    full = share([episode.correct for episode in outcomes(FULL.demonstrator)])
    assert 0.20 < full < 0.35
    always_guessing = Demonstrator(p_guess=1, p_busy=0)
    assert share([episode.correct for episode in outcomes(always_guessing)]) < 0.1


def test_demonstrations_contain_the_recoveries():
    conversations = demonstrations(count=2000, seed=0, demonstrator=FULL.demonstrator)
    recovered = mended = 0
    for each in conversations:
        messages = each["messages"]
        for before, at, after in zip(messages, messages[1:], messages[2:], strict=False):
            recovered += at["content"] == BUSY and after.get("tool_calls", 1) != 1 and _call(before) == _call(after)
            mended += at["content"] == WRONG and "tool_calls" in after
    assert recovered > 200
    assert mended > 200


def _call(message: Mapping[str, Any]) -> object:
    return message["tool_calls"][0]["function"]["arguments"] if message.get("tool_calls") else None


@pytest.mark.parametrize("recipe", [FULL, SMOKE])
def test_demonstrations_are_fixed_by_their_seed_and_never_held_out(recipe: CalculatorRecipe):
    def make(seed: int) -> list[Any]:
        return list(demonstrations(count=200, seed=seed, demonstrator=recipe.demonstrator, operations=recipe.operations))

    assert make(1) == make(1)
    assert make(1) != make(2)
    assert not any(is_held_out(each["messages"][0]["content"]) for each in make(1))


def test_every_demonstration_ends_with_the_demonstrator_and_has_at_most_six_turns():
    for each in demonstrations(count=500, seed=3, demonstrator=FULL.demonstrator):
        roles = [message["role"] for message in each["messages"]]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert roles.count("assistant") <= 6
