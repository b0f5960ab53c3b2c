"""An agent of the OpenAI Agents SDK: Responses, its default, whole, streamed or by ids; or chat completions."""

import asyncio
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api
from shell import bash


async def main(mode, task):
    if mode == "chat":
        set_default_openai_api("chat_completions")
    agent = Agent(name="writer", instructions="Be brief.", model="policy", tools=[function_tool(bash)])
    if mode == "stream":
        result = Runner.run_streamed(agent, task)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, task, auto_previous_response_id=mode == "by-id")
    return result.final_output


sys.stdout.write(f"{asyncio.run(main(*sys.argv[1:]))}\n")
