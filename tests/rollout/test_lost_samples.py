"""The exact check of what agents give up finds records that lack it, and calls that repeat the noise of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl.client import Client, PolicyBackend, arguments
from agentrl.client.arguments import call_seed
from agentrl.inference.backend import Generation
from agentrl.tokens.renderer import Renderer
from tests.rollout.impatient_agents import (
    answer_in_time,
    ask_something_else,
    close_early,
    give_up_a_stream,
    give_up_and_ask_again,
    leave_a_slow_stream,
    race,
    try_twice,
)
from tests.rollout.letters import Program, Stage, answer_to, gradient_error, opened, read_two
from tests.support.scripted import in_virtual_time

KINDS: list[Program] = [
    close_early,
    give_up_a_stream,
    give_up_and_ask_again,
    race,
    ask_something_else,
    leave_a_slow_stream,
    try_twice,
]


def error_of(program: Program, renderer: Renderer, seed: int | None = None) -> float:
    found: list[float] = []

    async def measure() -> None:
        found.append(await gradient_error(program, renderer, seed))

    in_virtual_time(measure)
    return found[0]


@pytest.mark.parametrize("program", KINDS)
def test_records_without_what_was_given_up_teach_something_else(
    program: Program, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(*given: object, **more: object) -> bool:
        return True  # the call has not failed, and no turn is recorded

    monkeypatch.setattr(PolicyBackend, "record_given_up", forget)
    assert error_of(program, renderer) > 1e-4


@pytest.mark.parametrize("program", KINDS)
def test_records_of_half_of_it_teach_something_else(
    program: Program, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = PolicyBackend.record_given_up

    def record_half(self: PolicyBackend, prompt: Any, request: Any, generation: Generation | None, *more: Any) -> bool:  # noqa: ANN401
        half = None if generation is None else generation.first(max(1, len(generation.output_ids) // 2))
        return record(self, prompt, request, half, *more)

    monkeypatch.setattr(PolicyBackend, "record_given_up", record_half)
    assert error_of(program, renderer) > 1e-4


async def stream_again(client: Client, stage: Stage) -> float:
    """Leave a stream that begins with two `a`, and ask again."""
    for number in range(2):
        async with await opened(client, "one") as stream:
            if await read_two(stream) != "aa":
                return 1.0 - 0.4 * number
    return -0.7


async def try_twice_with_a_seed(client: Client, stage: Stage) -> float:
    for number in range(2):
        answer = await answer_in_time(client, stage, "one", seed=7)
        if answer is not None:
            return 1.0 - 0.6 * number + 0.2 * len(answer)
    return -1.5


async def ask_both_with_a_seed(client: Client, stage: Stage) -> float:
    first = await answer_to(client, "one", seed=7)
    second = await answer_to(client, "one", seed=7)
    return 0.5 * len(first) - 0.3 * len(first) * len(second)


RETRIES: list[Program] = [stream_again, give_up_and_ask_again, try_twice, try_twice_with_a_seed, ask_both_with_a_seed]


@pytest.mark.parametrize("program", RETRIES)
def test_a_call_that_is_made_again_is_a_sample_of_its_own(program: Program, renderer: Renderer) -> None:
    assert error_of(program, renderer, seed=5) < 1e-6


def noise_of_the_episode(run_seed: int, episode_id: str, call: int) -> int:
    return call_seed(run_seed, episode_id, 0)


def noise_of_every_other_call(run_seed: int, episode_id: str, call: int) -> int:
    return call_seed(run_seed, episode_id, call // 2)


@pytest.mark.parametrize("mutant", [noise_of_the_episode, noise_of_every_other_call])
@pytest.mark.parametrize("program", RETRIES[:3])
def test_the_same_noise_again_teaches_something_else(
    program: Program, mutant: Callable[[int, str, int], int], renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "call_seed", mutant)
    assert error_of(program, renderer, seed=5) > 1e-4
