"""The puzzles of reasoning-gym, with answers that its own scorers judge in worker processes.

Invariant: a puzzle follows from its family, level, seed and number, and its worker makes the same one again before it scores
an answer. Training and held-out puzzles share no question, whatever their seeds: reasoning-gym seeds puzzle n with seed + n,
so that neighbouring seeds give nearly the same puzzles; the split goes by the question instead. What the scorer raises is a
fault of the environment; an answer that spends the scorer's CPU time is wrong.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, cast
from weakref import WeakValueDictionary

from agentrl.env import ChatStart, ChatStep, EpisodeEnd
from agentrl.errors import ConfigError, EnvironmentFault
from agentrl.types import Message, Task
from agentrl_rewards.workers import GraderLimits, GraderPool

ANSWER_INSTRUCTIONS: Final = "Think, then end with the final answer alone in <answer>...</answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MAX_ANSWER_CHARS: Final = 20_000
_HELD_OUT_SHARE: Final = 8
_MAX_MISSES: Final = 2_000
_BLOCK: Final = 16
"""Number of puzzles of which an endless source takes one."""
_NUM_PUZZLES: Final = 1_000_000
"""The size of the package's data sets, which make a puzzle when it is read."""
_SMALLER: Final = {"acre": 2_000, "word_ladder": 20_000}
"""The sizes of those that make all their puzzles when they are opened, or refuse a larger one."""
_LIMITS: Final = GraderLimits(cpu_s=30.0, memory_mb=4096, start_s=180.0)
"""Making a hard puzzle again takes some seconds, of which the answer's scoring is the last part."""
_graders: WeakValueDictionary[int, GraderPool] = WeakValueDictionary()
"""The worker processes that all instances share, by their number; they end with the last instance."""


def reasoning_tasks(
    families: Sequence[str],
    *,
    size: int,
    seed: int = 0,
    split: Literal["train", "held_out"] = "train",
    levels: tuple[int, int] | None = None,
) -> list[Task]:
    """Return `size` puzzles with different questions, the families in turn.

    Args:
        families: names of reasoning-gym's data sets, such as `chain_sum`.
        size: how many.
        seed: picks the puzzles.
        split: one question in eight is held out; which ones depends on the question alone.
        levels: the level, from 0, of the first and of the last task, as the curriculum of each family defines it; between
            them it rises evenly. A run draws them in this order with `tasks.shuffle: false`. None: the family's own mixture.

    Each task has `question`, `answer` (the package's), `reference` (a reply with it, for `agentrl validate`), `family`,
    `level`, `seed` and `number`.

    Raises:
        ConfigError: reasoning-gym is not installed; a family does not exist, has no levels, has no answer that its scorer
            accepts (such as `graph_color`), or has not so many questions.
    """
    _check_installed()
    low, high = levels if levels is not None else (None, None)
    tasks: dict[str, Task] = {}
    numbers = dict.fromkeys(families, 0)
    while len(tasks) < size:
        at = len(tasks)
        family = families[at % len(families)]
        level = None if low is None or high is None else low + round((high - low) * at / max(size - 1, 1))
        puzzles, misses = open_puzzles(family, level, seed), 0
        while True:
            number = numbers[family]
            numbers[family] += 1
            if misses > _MAX_MISSES or number == _SMALLER.get(family):
                raise ConfigError(f"reasoning_tasks: {family} has not enough {split} questions; found {at} of {size} tasks")
            entry = puzzles[number]
            question = str(entry["question"])
            if _is_held_out(family, question) == (split == "held_out") and question not in tasks:
                break
            misses += 1
        if puzzles.score_answer(answer=entry["answer"], entry=entry) != 1.0:
            raise ConfigError(
                f"reasoning_tasks: the scorer of {family} does not accept the answer that comes with the puzzle, "
                f"{str(entry['answer'])[:80]!r}, so its rewards cannot be checked; leave the family out"
            )
        tasks[question] = _puzzle_task(entry, family, split, level, seed, number)
    return list(tasks.values())


class ReasoningStream:
    """Puzzles without an end for `tasks.factory`, each made when a group draws it; the families in turn.

    They are of the training split, so that `reasoning_tasks(split="held_out")` shares none of their questions. A small
    family repeats questions at some time.

    Args:
        families: names of reasoning-gym's data sets, such as `chain_sum`.
        level: the level of all of them, from 0; None: the family's own mixture. For a curriculum over difficulty, give a
            source for each level in `tasks.sources`, and set `tasks.curriculum`.
        seed: picks the puzzles.

    Raises:
        ConfigError: reasoning-gym is not installed, or a family does not exist or has no such level.
    """

    def __init__(self, families: Sequence[str], *, level: int | None = None, seed: int = 0) -> None:
        _check_installed()
        if not families:
            raise ConfigError("ReasoningStream: expected at least one family, got none")
        for family in families:
            open_puzzles(family, level, seed)
        self._families, self._level, self._seed = tuple(families), level, seed

    def task(self, index: int) -> Task:
        """Return puzzle `index`, from 0; each has a block of numbers of its own, of which it takes the first that fits.

        Raises:
            ConfigError: none of the block fits: the scorer accepts no answer that comes with the puzzles.
        """
        family = self._families[index % len(self._families)]
        blocks = _SMALLER.get(family, _NUM_PUZZLES) // _BLOCK
        again, block = divmod(index // len(self._families), blocks)
        seed = self._seed + again * blocks * _BLOCK  # puzzle n is seeded with seed + n
        puzzles = open_puzzles(family, self._level, seed)
        for number in range(block * _BLOCK, (block + 1) * _BLOCK):
            entry = puzzles[number]
            is_right = puzzles.score_answer(answer=entry["answer"], entry=entry) == 1.0
            if is_right and not _is_held_out(family, str(entry["question"])):
                return _puzzle_task(entry, family, "train", self._level, seed, number)
        raise ConfigError(
            f"ReasoningStream: the scorer of {family} accepts none of the answers that come with puzzles "
            f"{block * _BLOCK} to {(block + 1) * _BLOCK - 1}, so its rewards cannot be checked; leave the family out"
        )


class ReasoningGymEnvironment:
    """A puzzle of reasoning-gym; one answer, in `<answer>`, gets the score of the package's own scorer as its reward.

    The score is from 0 to 1; some families pay 0.01 to 0.05 for any text. Tasks are those of `reasoning_tasks`.

    Args:
        instructions: follows the question in the message to the policy.
        num_workers: scoring processes at most, which all instances share.

    Raises:
        ConfigError: reasoning-gym is not installed, or `num_workers` is below 1.
    """

    extra = "agentrl[reasoning]"
    needs_packages = ("reasoning_gym",)

    def __init__(self, *, instructions: str = ANSWER_INSTRUCTIONS, num_workers: int = 2) -> None:
        _check_installed()
        self._instructions = instructions
        self._grader = _shared_grader(num_workers)
        self._task: Task | None = None

    @classmethod
    def check_arguments(cls, **options: Any) -> None:  # noqa: ANN401 - those of the class
        """Refuse what the class refuses, before anything else starts."""
        cls(**options)

    async def reset(self, task: Task, *, seed: int) -> ChatStart:
        """Begin with the task's question; its puzzle does not depend on `seed`."""
        self._task = task
        return ChatStart(messages=[{"role": "user", "content": f"{task['question']}\n\n{self._instructions}"}])

    async def step(self, message: Message) -> ChatStep:
        """Score the last `<answer>`; without one the reward is 0.

        Raises:
            EnvironmentFault: the scorer raised or died, or the worker makes another puzzle than the task's.

        Cancellation: the worker is ended.
        """
        task = self._task
        assert task is not None
        answers = _ANSWER.findall(str(message.get("content") or ""))
        if not answers or len(answers[-1]) > _MAX_ANSWER_CHARS:
            return _scored(0.0, answered=False)
        puzzle = (task["family"], task["level"], task["seed"], task["number"])
        reply = await self._grader.call(*puzzle, task["question"], answers[-1].strip())
        if reply.limit is not None:
            return _scored(0.0, answered=True)
        if reply.value is None:
            raise EnvironmentFault(
                f"task {task.id}: this reasoning-gym makes another puzzle of {puzzle}; make the tasks with the version that "
                "scores them"
            )
        return _scored(float(cast("float", reply.value)), answered=True)

    async def close(self) -> None:
        """Do nothing: the workers end with the last instance."""


def _is_held_out(family: str, question: str) -> bool:
    return zlib.crc32(f"{family}\n{question}".encode()) % _HELD_OUT_SHARE == 0


def _puzzle_task(entry: Mapping[str, Any], family: str, split: str, level: int | None, seed: int, number: int) -> Task:
    data = {"question": str(entry["question"]), "answer": entry["answer"], "family": family, "level": level}
    if isinstance(entry["answer"], str) and "</answer>" not in entry["answer"]:
        data["reference"] = f"<answer>{entry['answer']}</answer>"
    return Task(id=f"{family}-{split}-{seed}-{number}-{level}", data={**data, "seed": seed, "number": number})


def load_scorer() -> Callable[[str, int | None, int, int, str, str], float | None]:
    """Return the function that a worker runs: the score of an answer, None if the question is not the one it makes."""
    _package()
    make = functools.lru_cache(maxsize=32)(_make_puzzle)  # the episodes of a group are scored on the same puzzle

    def score(family: str, level: int | None, seed: int, number: int, question: str, answer: str) -> float | None:
        puzzles, entry = make(family, level, seed, number)
        if entry["question"] != question:
            return None
        return float(puzzles.score_answer(answer=answer, entry=entry))

    return score


@functools.lru_cache(maxsize=64)  # 5 to 400 ms a data set of those that read files
def open_puzzles(family: str, level: int | None, seed: int) -> Any:  # noqa: ANN401 - imported only where it is used
    """Return a data set of reasoning-gym, at a level of its curriculum or in its own mixture.

    Raises:
        ConfigError: there is no such family or level.
    """
    factory = _package()
    if family not in factory.DATASETS or family == "composite":
        near = ", ".join(sorted(factory.DATASETS)[:8])
        raise ConfigError(f"reasoning-gym has no family {family!r}; it has {near}, and {len(factory.DATASETS) - 9} others")
    where = {"seed": seed, "size": _SMALLER.get(family, _NUM_PUZZLES)}
    try:
        if level is None:
            return factory.create_dataset(family, **where)
        if family not in factory.CURRICULA:
            raise ConfigError(f"reasoning-gym: {family} has no levels; leave `levels` out")
        curriculum = factory.create_curriculum(family)
        num_levels = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=0)
        if not 0 <= level < num_levels:
            raise ConfigError(f"reasoning-gym: {family} has the levels 0 to {num_levels - 1}, got {level}")
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration(where)
        config.validate()
        return factory.DATASETS[family][0](config)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"reasoning-gym: {family} cannot be used at level {level}: {error}") from error


def _make_puzzle(family: str, level: int | None, seed: int, number: int) -> tuple[Any, Mapping[str, Any]]:
    puzzles = open_puzzles(family, level, seed)
    return puzzles, puzzles[number]


def _scored(score: float, *, answered: bool) -> ChatStep:
    metrics = {"success": float(score >= 1.0), "reasoning.answered": float(answered)}
    return ChatStep(reward=score, end=EpisodeEnd.TERMINATED, metrics=metrics)


def _shared_grader(num_workers: int) -> GraderPool:
    grader = _graders.get(num_workers)
    if grader is None:
        _graders[num_workers] = grader = GraderPool(
            "agentrl_envs.reasoning_gym:load_scorer", num_workers=num_workers, limits=_LIMITS
        )
    return grader


def _package() -> Any:  # noqa: ANN401 - as above
    import reasoning_gym  # pyright: ignore - the extra `reasoning`; registers the families  # noqa: F401
    from reasoning_gym import factory  # pyright: ignore

    return factory


def _check_installed() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed; run `pip install 'agentrl[reasoning]'`")
