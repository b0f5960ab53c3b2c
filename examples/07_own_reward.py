"""A reward of your own: a rubric adds weighted parts up, and every part is a metric of its own.

    .venv/bin/python examples/07_own_reward.py        # two seconds

What to see: the same parts in `trajectory.metrics` as in the reward, so that a run shows which one the policy earns. A part
may be async, such as a grader or a judge; one that raises or returns NaN fails the episode and is never a reward of 0.
"""

import anyio

import agentrl
from agentrl import Client, RolloutWorkflow, Task
from agentrl_rewards.match import exact_match
from agentrl_rewards.rubric import Rubric


def is_right(reply: str, task: Task) -> float:
    """Return 1.0 if the last line is the capital."""
    return float(exact_match(reply.splitlines()[-1] if reply else None, task["capital"]))


def is_short(reply: str, task: Task) -> float:
    """Return 1.0 for at most eight words."""
    del task
    return float(len(reply.split()) <= 8)


async def shouts(reply: str, task: Task) -> float:
    """Return the share of capital letters."""
    del task
    letters = [letter for letter in reply if letter.isalpha()]
    return sum(letter.isupper() for letter in letters) / len(letters) if letters else 0.0


class Capitals(RolloutWorkflow):
    """Asks for a capital and rewards a right, short and calm answer."""

    rubric = Rubric(right=(1.0, is_right), short=(0.2, is_short), shouting=(-0.5, shouts))

    async def run(self, task: Task, client: Client) -> float:
        """Return the weighted sum of the parts."""
        question = f"What is the capital of {task['country']}? Answer on the last line."
        completion = await client.chat.completions.create(messages=[{"role": "user", "content": question}])
        return await self.rubric(completion.choices[0].message.content or "", task, record=client.record)


async def main() -> None:
    task = Task(id="fr", data={"country": "France", "capital": "Paris"})
    for reply in ("Easy.\nParis", "PARIS", "Let me think about that for a very long time.\nLyon"):
        trajectory = await agentrl.run_episode(Capitals(), task, replies=[reply])
        parts = ", ".join(f"{name} {value:.2f}" for name, value in trajectory.metrics.items())
        print(f"{reply!r}: reward {trajectory.final_reward:.2f} ({parts})")


if __name__ == "__main__":
    anyio.run(main)
