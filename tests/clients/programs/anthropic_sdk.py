"""An agent on the anthropic package: a loop of its own, whole or streamed, or the package's tool runner."""

import sys

import anthropic
from anthropic import beta_tool
from shell import PARAMETERS, bash

TOOL = {"name": "bash", "description": "Run a shell command.", "input_schema": PARAMETERS}


def loop(client, task, stream):
    messages = [{"role": "user", "content": task}]
    arguments = {"model": "policy", "max_tokens": 2000, "system": "Be brief.", "tools": [TOOL], "messages": messages}
    counted = client.messages.count_tokens(model="policy", messages=messages, tools=[TOOL], system="Be brief.").input_tokens
    while True:
        if stream:
            with client.messages.stream(**arguments) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**arguments)
        if len(messages) == 1 and message.usage.input_tokens != counted:
            raise SystemExit(f"count_tokens says {counted}, the answer {message.usage.input_tokens}")
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return message.content[-1].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": bash(**call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def runner(client, task):
    messages = [{"role": "user", "content": task}]
    tool = beta_tool(bash)
    for message in client.beta.messages.tool_runner(model="policy", max_tokens=2000, tools=[tool], messages=messages):
        text = message.content[-1].text if message.content[-1].type == "text" else ""
    return text


def main(mode, task):
    client = anthropic.Anthropic()
    return runner(client, task) if mode == "runner" else loop(client, task, stream=mode == "stream")


sys.stdout.write(f"{main(*sys.argv[1:])}\n")
