"""A complete multi-turn tool agent; examples/calculator_agent.yaml describes its training run.

Run it from the repository root after `make demo`, which leaves a checkpoint that knows the tool:

    .venv/bin/agentrl train examples/calculator_agent.yaml --dry-run          # the plan, at once
    .venv/bin/agentrl train examples/calculator_agent.yaml                    # about a minute: success climbs step by step
    .venv/bin/agentrl eval examples/calculator_agent.yaml --greedy --checkpoint runs/calculator-agent/checkpoints/step-000060
"""

from typing import Literal

from agentrl import Client, MessageLike, RolloutWorkflow, Task, tool


@tool
def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class CalculatorAgent(RolloutWorkflow):
    """Answers an arithmetic question, with a tool that does one operation at a time."""

    max_turns: int = 6

    async def run(self, task: Task, client: Client) -> float:
        """Return 1.0 for the right answer, 0.0 otherwise; each tool call costs 0.02."""
        messages: list[MessageLike] = [{"role": "user", "content": task["question"]}]
        for _ in range(self.max_turns):
            completion = await client.chat.completions.create(messages=messages, tools=[calc.schema])
            message = completion.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(f" {task['answer']}." in (message.content or ""))
            messages += [await calc.reply(call) for call in message.tool_calls]  # bad arguments: an error the model reads
            client.reward(completion, -0.02)  # a reward for this turn
        return 0.0
