"""The pool is how Gymnasium is vectorised: 64 episodes at once, each in its own copy, each as if it were alone."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from agentrl.env import EnvironmentPool
from agentrl.types import Task

gymnasium = pytest.importorskip("gymnasium", reason="the extra agentrl[gym]")

from agentrl_envs.gymnasium import GymEnvironment  # noqa: E402

COPIES = 64
MAX_STEPS = 20


@pytest.fixture
def anyio_backend() -> str:
    """The pool's own tests run on trio, too; a copy of Taxi takes long to make."""
    return "asyncio"


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Blackjack-v1", "Taxi-v4"])
async def test_sixty_four_episodes_are_open_at_once_and_do_not_disturb_each_other(name: str) -> None:
    rewards: dict[int, list[float]] = {}
    num_open = 0
    all_open = anyio.Event()

    async def play(seed: int) -> None:
        nonlocal num_open
        async with pool.episode(Task(id=str(seed), data={}), seed=seed) as episode:
            num_open += 1
            if num_open == COPIES:
                all_open.set()
            await all_open.wait()
            rewards[seed] = []
            for action in actions(name, seed):
                step = await episode.step({"role": "assistant", "content": f"<action>{action}</action>"})
                rewards[seed].append(step.reward or 0.0)
                if step.end is not None:
                    break

    with anyio.fail_after(300):
        async with EnvironmentPool(lambda: GymEnvironment(name), name=name, size=COPIES) as pool:
            async with anyio.create_task_group() as tasks:
                for seed in range(COPIES):
                    tasks.start_soon(play, seed)
            assert pool.num_started == COPIES
            assert pool.num_faults == 0
    assert rewards == {seed: alone(name, seed) for seed in range(COPIES)}


def actions(name: str, seed: int) -> list[int]:
    """Return what an episode plays, whatever it sees."""
    count = {"FrozenLake-v1": 4, "Blackjack-v1": 2, "Taxi-v4": 6}[name]
    rng = random.Random(f"{name} {seed}")
    return [rng.randrange(count) for _ in range(MAX_STEPS)]


def alone(name: str, seed: int) -> list[float]:
    """Return the rewards of the same episode in Gymnasium itself."""
    env: Any = gymnasium.make(name)
    env.reset(seed=seed)
    rewards: list[float] = []
    for action in actions(name, seed):
        _, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    env.close()
    return rewards
