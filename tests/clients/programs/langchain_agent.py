"""An agent of langgraph on langchain-openai: chat completions, whole or streamed, or Responses."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from shell import bash


def main(mode, task):
    model = ChatOpenAI(model="policy", use_responses_api=mode == "responses", streaming=mode == "chat-stream")
    agent = create_react_agent(model, [tool(bash)], prompt="Be brief.")
    return agent.invoke({"messages": [("user", task)]})["messages"][-1].text


sys.stdout.write(f"{main(*sys.argv[1:])}\n")
