"""Order the responses to one question by a judge: pair by pair, or the whole group at once.

Invariant: the values of a group are from 0 to 1 with a mean of 0.5. Every comparison is made in several orders, because
judges prefer a place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import cast

from agentrl.errors import ConfigError
from agentrl.support.concurrency import task_group
from agentrl_rewards.judge import DATA_NOTICE, JudgeModel, last_object, quoted

_NOTICE = f"{DATA_NOTICE} Neither their order nor their length counts."
_MAX_LISTED = 26


class PairwiseJudge:
    """Compares responses two by two; the criterion says what makes a response better."""

    def __init__(self, model: JudgeModel, criterion: str) -> None:
        self._model = model
        self._instructions = (
            f"You compare two responses to a question by one criterion: {criterion}\n\n{_NOTICE}\n"
            'Reason briefly, then end with a line that is only a JSON object: {"better": "A"}, {"better": "B"} or '
            '{"better": "tie"}'
        )

    async def compare(self, question: str, first: str, second: str) -> float:
        """Return 1.0 if the first response is better, 0.0 if the second is, 0.5 if neither is: the mean over both orders."""
        if first == second:
            return 0.5
        shares: dict[bool, float] = {}

        async def ask(swapped: bool) -> None:
            one, other = (second, first) if swapped else (first, second)
            texts = quoted({"question": question, "response A": one, "response B": other})
            reply = await self._model.ask(self._instructions, texts, _read_better)
            shares[swapped] = 1 - reply.value if swapped else reply.value

        async with task_group() as tasks:
            for swapped in (False, True):
                tasks.start_soon(ask, swapped)
        return (shares[False] + shares[True]) / 2

    async def rank(self, question: str, responses: Sequence[str], *, num_opponents: int | None = None) -> list[float]:
        """Return the share of comparisons that each of two or more responses wins, 0 to 1.

        `num_opponents` others, an even number, meet each response; None: all of them. All pairs of 8 responses take 56
        requests, 4 opponents 32.
        """
        count = len(responses)
        pairs = list(combinations(range(count), 2)) if num_opponents is None else _ring(count, num_opponents)
        if count < 2:
            raise ConfigError(f"ranking needs at least two responses, got {count}")
        won: dict[tuple[int, int], float] = {}

        async def play(pair: tuple[int, int]) -> None:
            won[pair] = await self.compare(question, responses[pair[0]], responses[pair[1]])

        async with task_group() as tasks:
            for pair in pairs:
                tasks.start_soon(play, pair)
        results: list[list[float]] = [[] for _ in responses]
        for (first, second), share in sorted(won.items()):
            results[first].append(share)
            results[second].append(1 - share)
        return [math.fsum(shares) / len(shares) for shares in results]


class GroupJudge:
    """Orders a whole group of responses in one reply; each stands in a different place in `num_orders` presentations."""

    def __init__(self, model: JudgeModel, criterion: str, *, num_orders: int = 2, seed: int = 0) -> None:
        if num_orders < 1:
            raise ConfigError(f"GroupJudge: num_orders must be at least 1, got {num_orders}")
        self._model = model
        self._num_orders = num_orders
        self._seed = seed
        self._instructions = (
            f"You rank responses to a question by one criterion: {criterion}\n\n{_NOTICE}\n"
            "Reason briefly, then end with a line that is only a JSON object with the letters of all responses, the best "
            'first: {"ranking": ["B", "A", "C"]}'
        )

    async def rank(self, question: str, responses: Sequence[str]) -> list[float]:
        """Return the mean rank of each of 2 to 26 responses: 1.0 for the best, 0.0 for the worst; equal ones share it."""
        count = len(responses)
        if not 2 <= count <= _MAX_LISTED:
            raise ConfigError(f"GroupJudge ranks 2 to {_MAX_LISTED} responses, got {count}; use PairwiseJudge for more")
        order = list(range(count))
        random.Random(f"judge order {self._seed}").shuffle(order)
        values: list[list[float]] = [[] for _ in responses]

        async def ask(shift: int) -> None:
            shown = order[shift:] + order[:shift]
            texts = {f"response {_letter(place)}": responses[index] for place, index in enumerate(shown)}
            reply = await self._model.ask(self._instructions, quoted({"question": question, **texts}), _ranking_of(count))
            for rank, place in enumerate(reply.value):
                values[shown[place]].append(1 - rank / (count - 1))

        async with task_group() as tasks:
            for number in range(self._num_orders):
                tasks.start_soon(ask, number * max(1, count // self._num_orders) % count)
        means = [math.fsum(given) / len(given) for given in values]
        alike = {text: [means[at] for at, other in enumerate(responses) if other == text] for text in responses}
        return [math.fsum(alike[text]) / len(alike[text]) for text in responses]


def _read_better(text: str) -> float | None:
    better = last_object(text).get("better")
    return {"A": 1.0, "B": 0.0, "tie": 0.5}.get(better) if isinstance(better, str) else None


def _ranking_of(count: int) -> Callable[[str], list[int] | None]:
    letters = [_letter(place) for place in range(count)]

    def read(text: str) -> list[int] | None:
        found = last_object(text).get("ranking")
        ranking = cast("list[object]", found) if isinstance(found, list) else []
        names = [name for name in ranking if isinstance(name, str)]
        return [letters.index(name) for name in names] if sorted(names) == letters and len(names) == len(ranking) else None

    return read


def _letter(place: int) -> str:
    return chr(ord("A") + place)


def _ring(count: int, num_opponents: int) -> list[tuple[int, int]]:
    """Return pairs of a ring in which each member meets its `num_opponents` nearest neighbours."""
    if num_opponents < 2 or num_opponents % 2 or num_opponents >= count:
        raise ConfigError(f"num_opponents must be even, and from 2 to below the {count} responses, got {num_opponents}")
    return [(at, (at + step) % count) for at in range(count) for step in range(1, num_opponents // 2 + 1)]
