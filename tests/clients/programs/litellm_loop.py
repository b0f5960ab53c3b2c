"""An agent on litellm: chat completions, whole or streamed."""

import json
import sys

import litellm
from shell import PARAMETERS, bash

TOOL = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}


def main(mode, task):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task}]
    while True:
        answer = litellm.completion(model="openai/policy", messages=messages, tools=[TOOL], stream=mode == "chat-stream")
        if mode == "chat-stream":
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            output = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        if not message.tool_calls:
            return message.content


sys.stdout.write(f"{main(*sys.argv[1:])}\n")
