"""`sampling.unsupported: prompt`: the demand goes into the prompt, answers stay as they are, misses are counted, and
the turns of a conversation stay one branch."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, Json, TypeAdapter, ValidationError, WithJsonSchema

from agentrl.client import Client, ReplayBackend, SamplingConfig
from agentrl.client.demand import Demand
from agentrl.client.json_schema import misfit
from agentrl.client.schema_problem import schema_problem
from agentrl.errors import WorkflowError
from agentrl.types import StopReason
from tests.client.conftest import Says
from tests.support.chat import CALL, HI, Make, calc

PROMPT = SamplingConfig(max_tokens=200, unsupported="prompt")
OBJECT: Any = {"type": "json_object"}
TWICE = f"{CALL}\n{CALL}"


class Answer(BaseModel):
    number: int
    words: list[str] = []


@pytest.fixture
def client(make_client: Make) -> Client:
    return make_client(sampling=PROMPT)


def misses(client: Client) -> float | None:
    return client.close(StopReason.COMPLETED, 0.0).metrics.get("unsupported_misses")


async def test_a_conversation_with_structured_answers_is_one_branch_whose_prompts_begin_alike(client: Client, says: Says):
    says.script = ['{"number": 1}', '{"number": 2}', "free text", '{"number": 3}']
    messages: list[Any] = [{"role": "system", "content": "Count."}, *HI]
    for form in (OBJECT, OBJECT, None, OBJECT):
        completion = await client.chat.completions.create(messages=messages, response_format=form)
        messages += [completion.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "And now?"}]}]
    texts = [says.text(request) for request in says.requests]
    assert client.graph.forks == {}
    assert [turn.parent for turn in client.graph.turns] == [None, 0, 1, 2]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [text.count("Answer with one JSON object") for text in texts] == [1, 2, 2, 3]
    assert texts[0].endswith("hi\n\nAnswer with one JSON object and no other text.<|im_end|>\n<|im_start|>assistant\n")
    assert misses(client) == 0


async def test_a_forced_call_after_a_tools_reply_and_a_stream_continue_the_same_branch(client: Client, says: Says):
    says.script = [CALL, CALL, '{"number": 14}']
    messages: list[Any] = [*HI]
    for _ in range(2):
        completion = await client.chat.completions.create(messages=messages, tools=[calc.schema], tool_choice="required")
        message = completion.choices[0].message
        assert message.tool_calls is not None
        messages += [message, await calc.reply(message.tool_calls[0])]
    stream = await client.chat.completions.create(
        messages=messages, tools=[calc.schema], response_format=OBJECT, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(pieces) == '{"number": 14}'
    assert client.graph.forks == {}
    assert [turn.parent for turn in client.graph.turns] == [None, 0, 1]
    last = says.text(says.requests[-1])
    assert last.count("Answer with a tool call.") == 2
    assert "Unless you call a tool, answer with one JSON object" in last
    assert misses(client) == 0


@pytest.mark.parametrize(
    ("arguments", "answer", "missed", "asked"),
    [
        ({"response_format": OBJECT}, '{"a": 1}', 0, "one JSON object"),
        ({"response_format": OBJECT}, "[1]", 1, "one JSON object"),
        ({"response_format": OBJECT}, "Sure: {}", 1, "one JSON object"),
        ({"response_format": {"type": "text"}}, "x", None, ""),
        ({"tools": [calc.schema], "response_format": OBJECT}, CALL, 0, "Unless you call a tool"),
        ({"tools": [calc.schema], "tool_choice": "required"}, CALL, 0, "Answer with a tool call."),
        ({"tools": [calc.schema], "tool_choice": "required"}, "No.", 1, "Answer with a tool call."),
        ({"tools": [calc.schema], "tool_choice": {"type": "function", "function": {"name": "calc"}}}, CALL, 0, "tool calc"),
        ({"tools": [calc.schema], "parallel_tool_calls": False}, TWICE, 1, "at most one tool"),
        ({"tools": [calc.schema], "parallel_tool_calls": False}, "No call.", 0, "at most one tool"),
        ({"parallel_tool_calls": False}, "No tools.", None, ""),
        ({"tools": [calc.schema], "tool_choice": "none", "parallel_tool_calls": False}, "x", None, ""),
    ],
)
async def test_a_miss_is_counted_and_returned_as_it_is(
    client: Client, says: Says, arguments: dict[str, Any], answer: str, missed: int | None, asked: str
):
    says.script = [answer]
    completion = await client.chat.completions.create(messages=HI, **arguments)
    message = completion.choices[0].message
    assert len(message.tool_calls or ()) == answer.count("<tool_call>")
    assert message.content == (None if message.tool_calls else answer)
    assert asked in says.text(says.requests[0])
    assert client.graph.turns[0].output_ids.tolist() == says.ids(answer + "<|im_end|>")
    assert misses(client) == missed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"response_format": {"type": "grammar"}}, "must be text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, 'expected {"type": "json_schema"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"minLenght": 1}}}},
            "the keyword 'minLenght' is not known; is it 'minLength'",
        ),
        ({"tool_choice": "required"}, "the call has no tools"),
        ({"tools": [calc.schema], "tool_choice": "always"}, "name one of the tools"),
        ({"tools": [calc.schema], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "name one of the tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls must be True or False"),
    ],
)
async def test_a_demand_that_makes_no_sense_is_an_error_before_anything_is_sent(
    client: Client, says: Says, arguments: dict[str, Any], message: str
):
    with pytest.raises(WorkflowError, match=message):
        await client.chat.completions.create(messages=HI, **arguments)
    assert says.requests == []


async def test_parse_returns_the_object_and_for_a_miss_the_text_with_what_is_wrong(client: Client, says: Says):
    says.script = ['{"number": 3, "words": ["a"]}', '{"number": "three"}', "None."]
    found = [await client.chat.completions.parse(messages=HI, response_format=Answer) for _ in range(3)]
    first, second, third = [completion.choices[0].message for completion in found]
    assert first.parsed == Answer(number=3, words=["a"])
    assert (first.refusal, second.parsed, third.parsed) == (None, None, None)
    assert second.content == '{"number": "three"}'
    assert "number" in (second.refusal or "")
    assert third.content == "None."
    client.reward(found[1], 0.5)
    assert client.graph.turns[1].reward == 0.5
    assert '"title":"Answer"' in says.text(says.requests[0])
    assert misses(client) == 2


async def test_an_answer_cut_at_its_limit_is_a_miss_and_raises_nothing(client: Client, says: Says):
    says.script = [says.generation('{"number"', StopReason.LENGTH)]
    completion = await client.chat.completions.parse(messages=HI, response_format=Answer)
    assert completion.choices[0].message.parsed is None
    assert "token limit" in (completion.choices[0].message.refusal or "")
    assert misses(client) == 1


async def test_parse_is_refused_by_name_unless_the_run_says_prompt(make_client: Make):
    with pytest.raises(WorkflowError, match=r"response_format=.*`sampling.unsupported: prompt` .* asks for it"):
        await make_client().chat.completions.parse(messages=HI, response_format=Answer)


class Leaf(BaseModel):
    kind: str | None
    size: float


class Tree(BaseModel):
    name: str
    leaves: list[Leaf]
    child: Tree | None = None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "leaves", "child", "kind", "size"]), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(JSON | st.fixed_dictionaries({"name": JSON, "leaves": JSON, "child": JSON}))
def test_a_value_fits_the_schema_of_a_model_exactly_if_the_model_takes_it(value: object) -> None:
    schema = Tree.model_json_schema()
    assert schema_problem(schema) == ""
    try:
        TypeAdapter(Tree).validate_json(json.dumps(value), strict=True)
        fits = True
    except ValidationError:
        fits = False
    assert (misfit(value, schema) == "") is fits


@pytest.mark.parametrize(
    ("schema", "fitting", "other"),
    [
        ({"enum": [1, "a", None]}, [1, "a", None], [True, "b", 1.5]),
        ({"const": False}, [False], [0, None]),
        ({"type": "integer", "minimum": 1, "exclusiveMaximum": 4, "multipleOf": 1.5}, [3], [0, 4, 2, "3"]),
        ({"type": ["string", "null"], "minLength": 1, "maxLength": 2, "pattern": "^a"}, ["a", "ab", None], ["", "abc", "b"]),
        (
            {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "number"}},
            [[None, 1], []],
            [[1], [None, ""]],
        ),
        ({"type": "array", "minItems": 1, "maxItems": 2}, [[1]], [[], [1, 2, 3]]),
        ({"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}, [{"a": ""}], [{}, {"a": 1}]),
        ({"oneOf": [{"type": "number"}, {"minimum": 5}]}, [3, "text"], [6]),
        ({"allOf": [{"required": ["a"]}, {"maxProperties": 1}]}, [{"a": 1}, 5], [{}, {"a": 1, "b": 2}]),
        ({"properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, [{"a": {"a": {}}}], [{"a": {"b": 1}}]),
        ({"properties": {"a": False}}, [{}], [{"a": 1}]),
        ({"type": "array", "uniqueItems": True}, [[], [1, True, "1", [1]]], [[1, 1.0], [{"a": 1}, {"a": 1}], ["a", "a"]]),
        ({"uniqueItems": False}, [[1, 1]], []),
        ({"propertyNames": {"pattern": "^a"}}, [{"a": 1}, {}, 5], [{"b": 1}]),
        ({"patternProperties": {"^a": {"type": "null"}}}, [{"a": None, "b": 1}], [{"ab": 1}]),
        ({"patternProperties": {"^a": {}}, "additionalProperties": False}, [{"a": 1}], [{"b": 1}]),
        ({"not": {"type": "null"}}, [1], [None]),
        ({"not": {}}, [], [1, None]),
        ({"contains": {"type": "null"}}, [[1, None], "text"], [[1], []]),
        ({"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [[], [1]], [[1, 1.0]]),
        (
            {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"maxProperties": 0}},
            [{}, {"a": 1, "b": 1}],
            [{"a": 1}],
        ),
        ({"if": {"type": "null"}}, [None, 1], []),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"maxProperties": 1}}}, [{"a": 1}], [{"a": 1, "b": 1}]),
        ({"dependencies": {"a": ["b"], "c": {"maxProperties": 1}}}, [{"c": 1}], [{"a": 1}, {"b": 1, "c": 1}]),
        (
            {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
            [{"a": 1, "b": 2}],
            [{"c": 1}],
        ),
        (
            {
                "anyOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"required": ["b"]}],
                "unevaluatedProperties": False,
            },
            [{"a": 1}],
            [{"b": 1}, {"a": 1, "b": 1}],
        ),
        ({"prefixItems": [{}], "unevaluatedItems": {"type": "null"}}, [[1, None]], [[1, 2]]),
        ({"items": [{"type": "null"}], "additionalItems": False}, [[None], []], [[1], [None, 1]]),
        ({"type": "string", "nullable": True, "enum": ["a"]}, ["a", None], ["b", 1]),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}, [2, 3], [1, 4]),
        ({"const": 1, "enum": [1, 2]}, [1, 1.0], [2, True]),
        (
            {"properties": {"a": {"anyOf": [{"type": "null"}]}, "b": {"$ref": "#/properties/a/anyOf/0"}}},
            [{"b": None}],
            [{"b": 1}],
        ),
        ({"$defs": {"a b": {"type": "null"}}, "$ref": "#/$defs/a%20b"}, [None], [1]),
        (
            {
                "type": "string",
                "format": "made-up",
                "contentEncoding": "base64",
                "contentMediaType": "image/png",
                "x-order": 1,
                "contentSchema": {"type": "null"},
                "readOnly": True,
                "deprecated": True,
                "examples": ["a"],
                "$anchor": "n",
                "errorMessage": "no",
                "markdownDescription": "b",
                "externalDocs": {},
                "discriminator": {"propertyName": "a"},
            },
            ["text"],
            [1],
        ),
    ],
)
def test_each_keyword_is_checked(schema: dict[str, Any], fitting: list[object], other: list[object]) -> None:
    assert schema_problem(schema) == ""
    assert [value for value in fitting if misfit(value, schema)] == []
    assert [value for value in other if not misfit(value, schema)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"$ref": "#/$defs/No"},
        {"$ref": "http://a/b"},
        {"pattern": "("},
        {"items": 5},
        {"not": 5},
        {"$ref": "#Name"},
        {"$ref": "#/properties/a/5"},
        {"$dynamicRef": "#a"},
        {"uniqueItem": True},
        {"uniqueItems": 1},
        {"patternProperties": {"(": {}}},
        {"patternProperties": {"a": 5}},
        {"dependentRequired": {"a": 5}},
        {"dependencies": {"a": 5}},
        {"contains": {"minimun": 1}},
        {"then": {"type": "int"}},
        {"required": 1},
        {"required": [1]},
        {"minimum": "x"},
        {"properties": []},
        {"type": 5},
        {"type": [{}]},
        "object",
    ],
)
def test_a_schema_that_cannot_be_checked_is_no_schema(schema: object) -> None:
    assert schema_problem({"properties": {"a": schema}}).startswith("at $.properties.a")


class Point(BaseModel):
    kind: Literal["point"] = "point"
    at: Annotated[tuple[int, int], Field(examples=[(1, 2)])]


class Note(BaseModel):
    kind: Literal["note", "memo"]
    data: Annotated[bytes, WithJsonSchema({"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"})]


class Various(BaseModel):
    model_config = {"extra": "forbid", "json_schema_extra": {"x-version": 3, "$comment": "made up"}}
    names: set[str]
    counts: dict[Annotated[str, Field(pattern="^[a-z]+$")], Annotated[int, Field(ge=0)]]
    part: Annotated[Point | Note, Field(discriminator="kind", deprecated=True)]
    price: Decimal
    inner: Annotated[Json[list[int]] | None, Field(json_schema_extra={"readOnly": True, "x-unit": "m"})] = None
    when: datetime | None = None


def test_a_schema_of_a_model_of_many_kinds_is_taken_and_checked() -> None:
    schema = Various.model_json_schema()
    assert schema_problem(schema) == ""
    right: dict[str, Any] = {"names": ["a"], "counts": {"a": 1}, "part": {"at": [1, 2]}, "price": "1.5"}
    right["part"]["kind"] = "point"
    assert misfit(right, schema) == ""
    for wrong in (
        {"names": ["a", "a"]},
        {"counts": {"a": -1}},
        {"part": {"kind": "point", "at": [1]}},
        {"new": 1},
    ):
        assert misfit({**right, **wrong}, schema), wrong


def test_what_a_model_writes_never_raises() -> None:
    nested: dict[str, Any] = {"items": {"$ref": "#"}, "multipleOf": 0.1}
    assert schema_problem(nested) == ""
    assert "cannot be compared" in misfit(10**400, nested)
    for text in ("[" * 100_000, "9" * 5000, "\ud800", "NaN", ""):
        assert Demand(json=True).problem({"role": "assistant", "content": text})


def test_a_check_that_references_would_double_at_each_level_ends() -> None:
    defs: dict[str, Any] = {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}
    schema: dict[str, Any] = {"$defs": {**defs, "a60": {"type": "integer"}}, "$ref": "#/$defs/a0"}
    assert schema_problem(schema) == ""
    assert "too large to check" in misfit("text", schema)


async def test_a_conversation_with_instructions_replays(client: Client, says: Says) -> None:
    says.script = ['{"number": 1}', "no JSON", "free text"]
    messages: list[Any] = [*HI]

    async def talk(asked: Any) -> None:  # noqa: ANN401 - either client
        said = list(messages)
        for form in (OBJECT, OBJECT, None):
            completion = await asked.chat.completions.create(messages=said, response_format=form)
            said += [completion.choices[0].message, {"role": "user", "content": "And now?"}]

    await talk(client)
    recorded = client.close(StopReason.COMPLETED, 0.0)
    record = ReplayBackend(recorded)
    again = Client(record)
    await talk(again)
    assert record.diverged == []
    assert again.close(StopReason.COMPLETED, 0.0).metrics == recorded.metrics == {"unsupported_misses": 1.0}
