"""LangGraph: `ChatOpenAI` takes the client of the episode in place of its own two.

    .frameworks-venv/openai3/bin/python examples/frameworks/langgraph_agent.py

What to see: two model calls and one tool call make one training sample, which the policy sampled token by token.
"""

from typing import Literal

import anyio
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agentrl import Client, RolloutWorkflow, Task, run_episode

TASK = Task(id="1", data={"question": "What is 6 * 7?", "answer": "42"})
REPLIES = ['<tool_call>{"name": "calc", "arguments": {"a": 6, "op": "*", "b": 7}}</tool_call>', "The answer is 42."]


@tool
def calc(a: int, op: Literal["+", "-", "*"], b: int) -> str:
    """Do one arithmetic operation."""
    return str({"+": a + b, "-": a - b, "*": a * b}[op])


class Calculator(RolloutWorkflow):
    """Answers an arithmetic question with a tool."""

    async def run(self, task: Task, client: Client) -> float:
        chat = ChatOpenAI(model="policy", async_client=client.chat.completions, root_async_client=client, api_key="unused")
        model = chat.bind_tools([calc])

        async def call_model(state: MessagesState) -> dict[str, object]:
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", call_model)
        graph.add_node("tools", ToolNode([calc]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        try:
            state = await graph.compile().ainvoke({"messages": [("user", task["question"])]}, {"recursion_limit": 12})
        except GraphRecursionError:
            return 0.0  # a policy that never answers has not solved the task
        return float(task["answer"] in state["messages"][-1].text)


async def main() -> None:
    trajectory = await run_episode(Calculator(), TASK, replies=REPLIES)
    if trajectory.failure is not None:
        raise SystemExit(f"the episode failed: {trajectory.failure.message}")
    print(f"{len(trajectory.turns)} turns, {len(trajectory.branches())} sample, reward {trajectory.final_reward:g}")


if __name__ == "__main__":
    anyio.run(main)
