"""Calls as a list in Python's notation, `[f(a="x", b=1), g()]`: Llama 3.2 and 4 in some templates, LFM2 between tags.

Only literals are read: nothing is evaluated.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping, Sequence
from functools import partial

from agentrl.tokens.parse import ParsedCalls, RawCall, ReadCalls, Schemas, ToolFormat, make_call, read_blocks

_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}
_MAX_CHARS = 200_000
"""A longer text is not read: Python's parser takes memory of many times its size."""


def parse_call_list(text: str) -> list[RawCall] | None:
    """Return the calls of a list in Python's notation; None if the text is no such list."""
    if len(text) > _MAX_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        calls = [_call_of_node(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    good = [call for call in calls if call is not None]
    return good if len(good) == len(calls) else None


def parse_literal(text: str) -> object:
    """Return the list or dict that a text is in Python's notation; None if it is neither."""
    if len(text) > _MAX_CHARS or not text.startswith(("[", "{")):
        return None
    try:
        return _value_of_node(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _call_of_node(node: ast.expr) -> RawCall | None:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        return None
    return make_call(ast.unparse(node.func), {str(each.arg): _value_of_node(each.value) for each in node.keywords})


def _value_of_node(node: ast.expr) -> object:
    """Return the value of a literal; `ValueError` for anything else."""
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None):
            return node.value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List() | ast.Tuple():
            return [_value_of_node(each) for each in node.elts]
        case ast.Dict():
            return {
                str(_value_of_node(key)): _value_of_node(item)
                for key, item in zip(node.keys, node.values, strict=True)
                if key
            }
        case ast.Name() if node.id in _WORDS:
            return _WORDS[node.id]
        case _:
            raise ValueError(ast.dump(node))


def _read_call_list(text: str, tools: Schemas) -> ParsedCalls:
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").removeprefix("<|python_tag|>")
    if not body.lstrip().startswith("["):
        return ParsedCalls(text, [], False)
    calls = parse_call_list(body)
    return ParsedCalls(text, [], "(" in body) if calls is None else ParsedCalls("", calls, False)


def _between_tags(text: str, at: int, tools: Schemas) -> ReadCalls | None:
    end = text.find("<|tool_call_end|>", at)
    while end >= 0:
        calls = parse_call_list(text[at:end])
        if calls is not None:
            return ReadCalls(calls, end)
        end = text.find("<|tool_call_end|>", end + 1)
    calls = parse_call_list(text[at:])
    return None if calls is None else ReadCalls(calls, len(text))


def _write_between_tags(calls: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    texts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]
    return f"<|tool_call_start|>[{', '.join(texts)}]<|tool_call_end|>"


PYTHONIC = ToolFormat(
    name="pythonic",
    openings=("<|python_start|>", "<|python_tag|>"),
    starts=("[", "<|python_start|>", "<|python_tag|>"),
    read=_read_call_list,
)
LFM2 = ToolFormat(
    name="lfm2",
    openings=("<|tool_call_start|>",),
    read=partial(read_blocks, opening="<|tool_call_start|>", closing="<|tool_call_end|>", decode=_between_tags),
    write=_write_between_tags,
    sign="<|tool_list_start|>",
)
