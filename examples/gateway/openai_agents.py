"""An agent of the OpenAI Agents SDK that trains as it is: the SDK speaks Responses to the door of each episode.

    .frameworks-venv/openai3/bin/python examples/gateway/openai_agents.py    # after `make frameworks-install`
    agentrl train examples/gateway/openai_agents.yaml                        # after `make demo`; pip install openai-agents

What to see: the SDK has a base URL and a key, and speaks its own Responses. Its loop asks, calls the tool and asks again,
and each answer is a turn with the tokens that were sampled.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from agents import (
    Agent,
    FunctionTool,
    MaxTurnsExceeded,
    ModelBehaviorError,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    TResponseInputItem,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from agentrl import Client, RolloutWorkflow, Task, run_episode
from agentrl_envs.calculator import CalculatorEpisode

TASK = Task(id="1", data={"question": "Compute 6 * 7.", "answer": "42", "seed": 0})
REPLIES = ['<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>', "The answer is 42."]
QUIET = RunConfig(tracing_disabled=True)


class Calculator(RolloutWorkflow):
    """The agent of the demo, `agentrl_workflows.calculator.workflow`, as an agent of the SDK."""

    max_turns: int = 6
    """Model calls of one episode; without a right answer by then the reward is 0."""
    limit_reward = 0.0

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Keep one HTTP client for all episodes: a client of its own loads certificates, which takes 50 ms."""
        async with DefaultAsyncHttpxClient() as self._http:
            yield

    async def run(self, task: Task, client: Client) -> float:
        """Return 1.0, 0.7 after one wrong answer, or 0.0."""
        game = CalculatorEpisode(task)
        async with client.served() as door:
            provider = AsyncOpenAI(base_url=door.base_url, api_key=door.key, http_client=self._http)
            model = OpenAIResponsesModel(model="policy", openai_client=provider)
            agent = Agent(name="calculator", model=model, tools=[calc_of(game)])
            said: list[TResponseInputItem] = [{"role": "user", "content": task["question"]}]
            turns_left = self.max_turns
            while turns_left > 0:
                try:
                    result = await Runner.run(agent, said, max_turns=turns_left, run_config=QUIET)
                except (MaxTurnsExceeded, ModelBehaviorError):  # no answer, or a call of a tool that does not exist
                    break
                reply = game.answer(str(result.final_output))
                if reply is None:
                    break
                said = [*result.to_input_list(), {"role": "user", "content": str(reply["content"])}]
                turns_left -= len(result.raw_responses)
        client.record(correct=game.correct, busy=game.num_busy > 0, retried=game.num_wrong > 0)
        return game.reward


def calc_of(game: CalculatorEpisode) -> FunctionTool:
    """Return the calculator of one episode as a tool of the SDK."""
    function: Any = game.schema["function"]

    async def calc(_context: object, arguments: str) -> str:
        return str(game.call({"function": {"name": "calc", "arguments": arguments}})["content"])

    return FunctionTool(
        name=function["name"],
        description=function["description"],
        params_json_schema=function["parameters"],
        on_invoke_tool=calc,
        strict_json_schema=False,
    )


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} sample, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
