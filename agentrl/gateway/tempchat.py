from __future__ import annotations
import time
from typing import Any
import orjson
from agentrl.client.completion import completion, chunk, finish_reason, usage
from agentrl.gateway.dialect import DialectCall
from agentrl.servers.http.errors import decode_body, openai_error
from agentrl.gateway.body import CallRefused


class Writer:
    def __init__(self, call, id):
        self.call = call
        self.header = {"id": id, "object": "chat.completion.chunk", "created": int(time.time()), "model": call.model}

    def _e(self, c):
        return b"data: " + orjson.dumps(c.model_dump(mode="json", exclude_unset=True)) + b"\n\n"

    def begin(self):
        return [self._e(chunk(self.header, {"role": "assistant", "content": ""}))]

    def push(self, d):
        return [
            self._e(chunk(self.header, {n: t})) for n, t in (("reasoning_content", d.reasoning), ("content", d.content)) if t
        ]

    def finish(self, a):
        out = [
            self._e(chunk(self.header, {"tool_calls": [{"index": i, **c}]}))
            for i, c in enumerate(a.message.get("tool_calls") or ())
        ]
        out.append(self._e(chunk(self.header, {}, finish=finish_reason(a.message, a.generation))))
        return [*out, b"data: [DONE]\n\n"]

    def fail(self, m, *, status, code):
        return [b"data: " + orjson.dumps(openai_error(m, status=status, code=code)) + b"\n\n"]


class ChatDialect:
    name = "chat"

    def read(self, body, store):
        sent = decode_body(body, dict[str, object])
        rest = {
            k: v for k, v in sent.items() if k not in ("model", "messages", "stream", "stream_options") and v is not None
        }
        if not isinstance(sent.get("messages"), list):
            raise CallRefused("messages must be a list")
        return DialectCall(
            model=str(sent.get("model", "policy")),
            messages=sent["messages"],
            arguments=rest,
            stream=bool(sent.get("stream")),
            body=sent,
        )

    def answer(self, call, answer):
        d = completion(answer).model_dump(mode="json", exclude_unset=True)
        d["choices"][0].pop("token_ids", None)
        return d

    def events(self, call, answer_id):
        return Writer(call, answer_id)

    def refusal(self, message, *, status, code):
        return openai_error(message, status=status, code=code)

    def keep(self, call, answer, store):
        pass

    def answer_id(self, response_id):
        return response_id
