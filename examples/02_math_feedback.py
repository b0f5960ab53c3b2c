"""Math with feedback: a wrong answer is not the end, the model reads that it is wrong and tries again.

    .venv/bin/python examples/02_math_feedback.py                                  # two seconds, a script answers
    .venv/bin/agentrl validate examples/02_math_feedback.yaml --limit 50           # the tasks, without a model
    .venv/bin/agentrl train examples/02_math_feedback.yaml --dry-run               # the plan of a training run

What to see: three attempts are three turns of one conversation; a later right answer is worth less. The bundled
`agentrl_workflows.math_feedback` does the same with equivalence of formulas.
"""

import anyio

import agentrl
from agentrl import Client, MessageLike, RolloutWorkflow, Task
from agentrl_rewards.extract import boxed, first_of, last_number
from agentrl_rewards.match import numeric_match
from agentrl_workflows.tasks.word_problems import word_problems


class MathAttempts(RolloutWorkflow):
    """Asks until the answer is right, three times at most."""

    max_attempts: int = 3
    find_answer = staticmethod(first_of(boxed, last_number))

    async def run(self, task: Task, client: Client) -> float:
        """Return 1.0 for a right first answer, 0.8 for a right second one, 0.64 for the third."""
        messages: list[MessageLike] = [{"role": "user", "content": f"{task['question']} Put the answer in \\boxed{{}}."}]
        for attempt in range(self.max_attempts):
            completion = await client.chat.completions.create(messages=messages)
            message = completion.choices[0].message
            if numeric_match(self.find_answer(message.content or ""), task["answer"]):
                return 0.8**attempt
            messages += [message, {"role": "user", "content": "Your answer is wrong, try again."}]
        return 0.0


async def main() -> None:
    [task] = word_problems(count=1, levels=[4])
    print(task["question"])
    wrong, right = "I guess \\boxed{0}.", task["reference"]
    for replies in ([right], [wrong, right], [wrong, wrong, wrong]):
        trajectory = await agentrl.run_episode(MathAttempts(), task, replies=replies)
        print(f"{[turn.message['content'] for turn in trajectory.turns]}: reward {trajectory.final_reward}")


if __name__ == "__main__":
    anyio.run(main)
