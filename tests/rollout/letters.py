"""A policy of letters: every episode of a program with the real client, with its chance, and the gradient that it teaches.

An answer is `b`, `ab`, `aab` or `aaa`: each letter is a choice of the policy, whose logit depends on the question and on the
letters before. The server plays what the policy chose, whether or not the program reads it. Two calls of one seed get the
same answer to a question. All episodes of a program are played, so expectations are finite sums.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np

from agentrl.algo.batch_advantages import advantages
from agentrl.algo.config import AlgorithmConfig
from agentrl.client import Client
from agentrl.rollout.config import RolloutConfig
from agentrl.rollout.episode import run_policy_episode
from agentrl.servers.scripted.server import Hold, ScriptedCall, ScriptedReply, ScriptedServer
from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from agentrl.types import Group, Task, Trajectory
from tests.rollout.harness import PATIENCE_S, SAMPLING, TASK, workflow_of

ANSWERS = ("b", "ab", "aab", "aaa")
QUESTIONS = ("one", "two", "three")
_TURN = AlgorithmConfig(advantage="turn", group_size=2)
_EPISODE = AlgorithmConfig(advantage="episode", group_size=2)
Gradient = defaultdict[tuple[str, str], float]
"""By state: the question, and the letters before."""
LOGITS = {
    (question, "a" * length): value
    for (question, length), value in zip(
        itertools.product(QUESTIONS, range(3)), np.random.default_rng(3).normal(size=9).tolist(), strict=True
    )
}
"""The logit of `b` in each state."""


@dataclass
class Stage:
    """What a program sees of its episode beside the client."""

    holds: dict[str, Hold] = field(default_factory=dict[str, Hold])
    """By question."""

    def hold(self, question: str) -> Hold:
        """Return the hold before the third letter of the answer to a question, made before it is asked."""
        return self.holds.setdefault(question, Hold(at=2))


Program = Callable[[Client, Stage], Awaitable[float]]


@dataclass(frozen=True)
class Played:
    """One possible episode."""

    answers: tuple[tuple[str, str], ...]
    """The question and the answer of each choice of the policy."""
    trajectory: Trajectory

    @property
    def chance(self) -> float:
        return math.prod(chance_of(question, answer) for question, answer in self.answers)


def chance_of(question: str, answer: str) -> float:
    signs = [1 if letter == "b" else -1 for letter in answer]
    return math.prod(1 / (1 + math.exp(-sign * LOGITS[question, answer[:at]])) for at, sign in enumerate(signs))


def score_of(question: str, letters: str) -> Gradient:
    """Return the gradient of the log-probability of letters."""
    found = Gradient(float)
    for at, letter in enumerate(letters):
        found[question, letters[:at]] += float(letter == "b") - chance_of(question, letters[:at] + "b") / (
            chance_of(question, letters[:at]) if at else 1.0
        )
    return found


def added(into: Gradient, factor: float, gradient: Gradient) -> None:
    for state, value in gradient.items():
        into[state] += factor * value


async def all_episodes(program: Program, renderer: Renderer, seed: int | None = None) -> list[Played]:
    """Play every episode that the choices of the policy make of a program; `seed` is of the run."""
    found: list[Played] = []
    path: list[int] = []
    while True:
        found.append(await _one_episode(program, renderer, path, seed))
        while path and path[-1] == len(ANSWERS) - 1:
            path.pop()
        if not path:
            return found
        path[-1] += 1


async def _one_episode(program: Program, renderer: Renderer, path: list[int], seed: int | None) -> Played:
    """Play the episode of these choices, and note the further ones that it needed."""
    stage, chosen = Stage(), dict[tuple[object, str], str]()

    def script(call: ScriptedCall) -> ScriptedReply:
        text = renderer.decode(call.input_ids, skip_special=False)
        question = max(QUESTIONS, key=text.rfind)
        noise = (object() if call.sampling.seed is None else call.sampling.seed, question)
        if noise not in chosen:
            if len(chosen) == len(path):
                path.append(0)
            chosen[noise] = ANSWERS[path[len(chosen)]]
        answer = chosen[noise]
        ids = [renderer.encode_content(letter)[0] for letter in answer]
        is_held = len(answer) > 2 and question in stage.holds
        holds = (stage.holds[question],) if is_held else ()
        return ScriptedReply(output=[*ids, min(renderer.eos_ids)], holds=holds)

    def run(task: Task, client: Client) -> Awaitable[float]:
        return program(client, stage)

    server = ScriptedServer(script, vocab_size=renderer.vocab_size, eos_id=min(renderer.eos_ids))
    with anyio.fail_after(PATIENCE_S):
        trajectory = await run_policy_episode(
            workflow_of(run),
            TASK,
            backend=server,
            renderer=renderer,
            rollout=RolloutConfig(episode_timeout_s=PATIENCE_S),
            sampling=SAMPLING,
            seed=seed,
        )
    assert trajectory.failure is None, trajectory.failure
    verify(trajectory)
    return Played(tuple((question, answer) for (_, question), answer in chosen.items()), trajectory)


def true_gradient(episodes: Sequence[Played]) -> Gradient:
    """Return the gradient of the expected return: every letter that was sampled counts."""
    total = Gradient(float)
    for one in episodes:
        for question, answer in one.answers:
            added(total, one.chance * one.trajectory.episode_return, score_of(question, answer))
    return total


def taught_gradient(episodes: Sequence[Played], renderer: Renderer, config: AlgorithmConfig) -> Gradient:
    """Return the expectation of what groups of two teach by their records."""
    letter_of = {renderer.encode_content(letter)[0]: letter for letter in "ab"}

    def turn_scores(one: Played) -> list[Gradient]:
        scores: list[Gradient] = []
        for turn in one.trajectory.turns:
            letters = "".join(letter_of.get(token, "") for token in turn.output_ids.tolist())
            scores.append(score_of(str(turn.messages[-1]["content"]), letters))
        return scores

    scores = [turn_scores(one) for one in episodes]
    total = Gradient(float)
    for first, second in itertools.product(range(len(episodes)), repeat=2):
        pair = (episodes[first].trajectory, episodes[second].trajectory)
        group = Group(index=0, task=TASK, episodes=pair, admitted_version=0)
        chance = episodes[first].chance * episodes[second].chance
        for at, values in zip((first, second), advantages(group, config).per_turn, strict=True):
            for value, score in zip(values.tolist(), scores[at], strict=True):
                added(total, chance * value / 2, score)
    return total


def largest_difference(one: Gradient, other: Gradient) -> float:
    return max(abs(one.get(state, 0.0) - other.get(state, 0.0)) for state in one.keys() | other.keys())


async def gradient_error(program: Program, renderer: Renderer, seed: int | None = None) -> float:
    """Return how far what the episodes of a program teach is from the gradient of its expected return, at most.

    `seed` is of the run.
    """
    episodes = await all_episodes(program, renderer, seed)
    assert abs(sum(one.chance for one in episodes) - 1.0) < 1e-12
    truth = true_gradient(episodes)
    assert max(map(abs, truth.values())) > 0.005
    halved = taught_gradient(episodes, renderer, _EPISODE)
    for state in halved:
        halved[state] *= 2
    taught = taught_gradient(episodes, renderer, _TURN)
    return max(largest_difference(taught, truth), largest_difference(halved, truth))


async def check_gradient(program: Program, renderer: Renderer, seed: int | None = None) -> None:
    """Check that what the episodes of a program teach is the gradient of its expected return; `seed` is of the run."""
    assert await gradient_error(program, renderer, seed) < 1e-6


def asked(question: str) -> dict[str, str]:
    """Return the message of a user."""
    return {"role": "user", "content": question}


async def opened(client: Any, question: str, *before: dict[str, str], **more: Any) -> Any:  # noqa: ANN401
    """Return the stream of an answer."""
    messages = [*before, asked(question)]
    return await client.chat.completions.create(model="m", messages=messages, stream=True, max_tokens=8, **more)


async def answer_to(client: Any, question: str, *before: dict[str, str], **more: Any) -> str:  # noqa: ANN401
    """Return the letters of an answer."""
    messages = [*before, asked(question)]
    completion = await client.chat.completions.create(model="m", messages=messages, max_tokens=8, **more)
    return completion.choices[0].message.content or ""


async def read_two(stream: Any) -> str:  # noqa: ANN401
    """Return the first two letters of a stream, or fewer."""
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        if len(text) == 2:
            break
    return text
