"""Dialogue shapes, as clients send them."""

from __future__ import annotations

from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Do one arithmetic operation. Say \"why\" & <how>.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "left"},
                "op": {"type": "string", "enum": ["+", "-", "*"]},
                "b": {"type": "integer"},
            },
            "required": ["a", "op", "b"],
        },
    },
}  # fmt: skip


def call(number: int, arguments: str = '{"a": 1, "op": "+", "b": 2}', name: str = "calc") -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*arguments: str, content: str | None = None, **more: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [call(at, text) for at, text in enumerate(arguments)],
        **more,
    }


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: str, **more: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ONE, TWO = '{"a": 1, "op": "+", "b": 2}', '{"op": "*", "a": 3, "b": -4}'
SHAPES: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "question": ([user("What is 1 + 2?"), assistant("3")], False),
    "system": ([system("Be brief."), user("Hi, what is  this?\n\n"), assistant("A test.")], False),
    "two questions": ([user("One?"), assistant("1"), user("Two?"), assistant("2")], False),
    "long": ([user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")], False),
    "unicode": ([user("naïve 中文 🙂 \t x"), assistant("日本 \u200d é\n")], False),
    "code": ([user("if a < b and c > d: x[0] = {1: '}'}"), assistant("```py\nx<y>z\n```")], False),
    "thinking": ([user("1 + 1?"), assistant("2", reasoning_content="one and one"), user("2 + 2?"), assistant("4")], False),
    "call": ([user("1 + 2?"), calls(ONE), result(0, "3"), assistant("It is 3.")], True),
    "call with text": ([user("1 + 2?"), calls(ONE, content="Let me see."), result(0, "3"), assistant("3")], True),
    "call with system": ([system("Use tools."), user("1 + 2?"), calls(ONE), result(0, "3"), assistant("3")], True),
    "parallel calls": ([user("both?"), calls(ONE, TWO), result(0, "3"), result(1, "-12"), assistant("3, -12")], True),
    "call, then question": ([user("x?"), calls(ONE), result(0, "3"), assistant("3"), user("y?"), assistant("no")], True),
    "retry": ([user("x?"), calls(ONE), result(0, "error: busy"), calls(ONE), result(0, "3"), assistant("3")], True),
    "thinking calls": (
        [
            user("x?"),
            calls(ONE, reasoning_content="I need a tool"),
            result(0, "3"),
            assistant("3", reasoning_content="done"),
            user("y?"),
            assistant("z", reasoning_content="easy"),
        ],
        True,
    ),
}  # fmt: skip
