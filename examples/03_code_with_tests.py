"""Code with tests: the reply is run in the sandbox against hidden tests, and the model reads which of them failed.

    .venv/bin/python examples/03_code_with_tests.py        # three seconds; needs the sandbox (make sandbox-install)

What to see: the reward is 1 if all hidden tests pass. The feedback has the outcome of each test; what is expected does not
enter the sandbox at all. The bundled `agentrl_workflows.programming` has 80 such tasks.
"""

import anyio

import agentrl
from agentrl import Client, MessageLike, Task
from agentrl_rewards.code import CodeGrader, read_tests
from agentrl_workflows.sandboxed import SandboxedWorkflow

TASK = Task(
    id="mean",
    data={
        "question": "Write a Python function `mean(values)` that returns the mean of a list, and 0.0 for an empty "
        "one. Answer with one block of Python code.",
        "tests": {"calls": [["mean([1, 2])", "1.5"], ["mean([])", "0.0"], ["mean([3.0])", "3.0"]]},
    },
)
FIRST = "```python\ndef mean(values):\n    return sum(values) / len(values)\n```"
SECOND = "```python\ndef mean(values):\n    return sum(values) / len(values) if values else 0.0\n```"


class CodeAttempts(SandboxedWorkflow):
    """Asks for a function twice, with the outcome of the tests in between."""

    max_attempts: int = 2

    async def run(self, task: Task, client: Client) -> float:
        """Return 1.0 if the last attempt passes all tests."""
        grader, tests = CodeGrader(self.sandbox), read_tests(task["tests"])
        messages: list[MessageLike] = [{"role": "user", "content": task["question"]}]
        reward = 0.0
        for _ in range(self.max_attempts):
            completion = await client.chat.completions.create(messages=messages)
            message = completion.choices[0].message
            grade = await grader.grade(message.content, tests)
            client.record(**grade.metrics)
            reward = grade.reward
            if grade.is_solved:
                break
            print(grade.feedback())
            messages += [message, {"role": "user", "content": f"{grade.feedback()} Correct the function."}]
        return reward


async def main() -> None:
    trajectory = await agentrl.run_episode(CodeAttempts(), TASK, replies=[FIRST, SECOND])
    print(f"{len(trajectory.turns)} attempts, reward {trajectory.final_reward}, solved {trajectory.metrics['solved']:.0f}")


if __name__ == "__main__":
    anyio.run(main)
