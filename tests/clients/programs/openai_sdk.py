"""An agent on the openai package alone: chat completions or Responses, whole or streamed."""

import json
import sys

from openai import OpenAI
from shell import PARAMETERS, bash

CHAT_TOOL = {"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}
RESPONSES_TOOL = {"type": "function", "name": "bash", "parameters": PARAMETERS, "strict": False}


def chat(client, task, stream):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": task}]
    while True:
        arguments = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL]}
        if stream:
            with client.chat.completions.stream(**arguments) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**arguments).choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls or ():
            output = bash(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        if not message.tool_calls:
            return message.content


def responses(client, task, stream, by_id):
    items, previous = [{"role": "user", "content": task}], None
    while True:
        arguments = {"model": "policy", "input": items, "tools": [RESPONSES_TOOL], "instructions": "Be brief."}
        arguments |= {"previous_response_id": previous} if previous else {}
        arguments |= {} if by_id else {"store": False}
        if stream:
            with client.responses.stream(**arguments) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(**arguments)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        shown = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
        items = [] if by_id else [*items, *shown]
        previous = response.id if by_id else None
        for call in calls:
            output = bash(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def main(mode, task):
    client = OpenAI()
    if mode.startswith("chat"):
        return chat(client, task, stream=mode == "chat-stream")
    return responses(client, task, stream=mode == "responses-stream", by_id=mode == "responses-by-id")


sys.stdout.write(f"{main(*sys.argv[1:])}\n")
