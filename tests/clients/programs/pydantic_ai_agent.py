"""An agent of pydantic-ai: chat completions, Responses or Messages."""

import sys

from pydantic_ai import Agent
from shell import bash

NAMES = {"chat": "openai-chat:policy", "responses": "openai-responses:policy", "messages": "anthropic:policy"}


def main(mode, task):
    agent = Agent(NAMES[mode], instructions="Be brief.", tools=[bash])
    return agent.run_sync(task).output


sys.stdout.write(f"{main(*sys.argv[1:])}\n")
