"""A tool calling agent of smolagents, on chat completions."""

import os
import sys

from shell import bash
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


def main(mode, task):
    model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(tools=[tool(bash)], model=model, max_steps=6)
    return agent.run(task)


sys.stdout.write(f"{main(*sys.argv[1:])}\n")
