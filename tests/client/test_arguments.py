"""Every keyword of chat.completions.create is honoured, harmless, or an error that names it."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.client.arguments import CallArguments, read_arguments, wants_stream
from agentrl.client.config import SamplingConfig
from agentrl.errors import WorkflowError

TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


def read(**arguments: Any) -> CallArguments:  # noqa: ANN401
    defaults = SamplingConfig(temperature=0.7, top_p=0.9, max_tokens=99, template_options={"enable_thinking": False})
    return read_arguments(arguments, defaults, default_timeout=None, vocab_size=384)


def test_nothing_given_means_the_runs_defaults():
    call = read()
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.max_new_tokens) == (0.7, 0.9, 99)
    assert (call.sampling.top_k, call.sampling.min_p, call.sampling.stop, call.sampling.seed) == (-1, 0.0, (), None)
    assert call.tools is None
    assert call.timeout_s is None
    assert not call.logprobs


def test_none_omit_and_not_given_all_mean_the_default():
    names = ["temperature", "top_p", "max_tokens", "stop", "tools", "seed", "n", "logprobs", "response_format", "timeout"]
    for nothing in (None, openai.omit, openai.NOT_GIVEN):
        assert read(**dict.fromkeys(names, nothing)) == read()


def test_sampling_arguments_arrive():
    call = read(
        temperature=0, top_p=0.5, max_tokens=7, seed=3, stop="END", frequency_penalty=0.0, presence_penalty=0,
        extra_body={"top_k": 4, "min_p": 0.1, "ignore_eos": True, "stop_token_ids": [1, 2]},
    )  # fmt: skip
    s = call.sampling
    assert (s.temperature, s.top_p, s.max_new_tokens, s.seed, s.stop) == (0.0, 0.5, 7, 3, ("END",))
    assert (s.frequency_penalty, s.presence_penalty, s.top_k, s.min_p) == (0.0, 0.0, 4, 0.1)
    assert (s.ignore_eos, s.stop_token_ids) == (True, (1, 2))


def test_max_completion_tokens_wins_over_max_tokens():
    assert read(max_tokens=5, max_completion_tokens=6).sampling.max_new_tokens == 6


def test_extra_body_overrides_named_arguments_as_the_wire_would():
    assert read(temperature=0.2, extra_body={"temperature": 0.3}).sampling.temperature == 0.3


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"parallel_tool_calls": True}, {"service_tier": "auto"},
        {"safety_identifier": "s"}, {"prompt_cache_key": "k"}, {"prompt_cache_retention": "24h"}, {"model": "any"},
        {"extra_headers": {"X": "y"}}, {"extra_query": {"q": "1"}}, {"n": 1}, {"top_logprobs": 0}, {"modalities": ["text"]},
        {"modalities": ("text",)}, {"stream_options": {}}, {"stream_options": {"include_usage": None}}, {"logprobs": False},
        {"response_format": {"type": "text"}}, {"tool_choice": "auto"}, {"logit_bias": {}}, {"parallel_tool_calls": None},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"extra_body": {}},
    ],
)  # fmt: skip
def test_harmless_arguments_change_no_sampling(harmless: dict[str, Any]):
    assert read(**harmless).sampling == read().sampling


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"n": 2}, "n=2"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "calc"}}, "tools": [TOOL]}, "tool_choice"),
        ({"parallel_tool_calls": False}, "take the first call"),
        ({"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls=False"),
        ({"parallel_tool_calls": "false"}, "parallel_tool_calls='false'"),
        ({"extra_body": {"parallel_tool_calls": False}}, "parallel_tool_calls=False"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": 3}, "modalities=3"),
        ({"modalities": True}, "modalities=True"),
        ({"stream_options": 3}, "stream_options must be a mapping, got int 3"),
        ({"stream_options": [1]}, "stream_options must be a mapping"),
        ({"stream_options": {"include_usage": "no"}}, "include_usage must be True or False, got str 'no'"),
        ({"extra_headers": 3}, "extra_headers must be a mapping, got int 3"),
        ({"extra_body": 3}, "extra_body must be a mapping, got int 3"),
        ({"extra_body": {"return_token_ids": "no"}}, "return_token_ids must be True or False"),
        ({"logprobs": "no"}, "logprobs must be True or False, got str 'no'"),
        ({"logprobs": 1}, "logprobs must be True or False, got int 1"),
        ({"temperature": 10**400}, "temperature must be a number between 0 and 100, got int 1000"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1e-300}, r"temperature must be 0 \(greedy\) or 1e-06 to 100, got 1e-300"),
        ({"top_p": 10**400}, "top_p"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"seed": 10**400}, "seed"),
        ({"extra_body": {"top_k": 10**400}}, "top_k"),
        ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"extra_body": {"tools": []}}, "tools"),
        ({"extra_body": [1]}, "extra_body"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, "chat_template_kwargs"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"seed": "1"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"extra_body": {"top_k": 0}}, "top_k"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"stop_token_ids": [384]}}, "stop_token_ids"),
        ({"extra_body": {"ignore_eos": "yes"}}, "ignore_eos"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"tools": "calc"}, "tools"),
        ({"tools": [{"name": "calc"}]}, "tools\\[0\\]"),
    ],
)
def test_what_cannot_be_honoured_is_an_error_that_names_it(arguments: dict[str, Any], names: str):
    with pytest.raises(WorkflowError, match=names):
        read(**arguments)


def test_a_stream_is_asked_for_with_true_and_with_nothing_else():
    assert wants_stream(True)
    for nothing in (False, None, openai.omit, openai.NOT_GIVEN):
        assert not wants_stream(nothing)
    for wrong in (1, 0, "true", "", [], 1.0):
        with pytest.raises(WorkflowError, match="stream must be True or False"):
            wants_stream(wrong)


def test_an_unknown_keyword_is_a_type_error_that_suggests_the_right_one():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'temprature'; did you mean 'temperature'"):
        read(temprature=1)


def test_tool_choice_none_renders_without_tools():
    assert read(tools=[TOOL], tool_choice="none").tools is None
    assert read(tools=[TOOL]).tools == [TOOL]
    assert read(tools=[]).tools is None


def test_a_timeout_may_be_seconds_or_an_http_timeout_object():
    assert read(timeout=2).timeout_s == 2.0
    assert read(timeout=10**400).timeout_s == read(timeout=math.inf).timeout_s == 1e9
    assert read(timeout=openai.Timeout(9.0, read=3.0)).timeout_s == 3.0
    assert read_arguments({}, SamplingConfig(), default_timeout=4.0, vocab_size=9).timeout_s == 4.0
    assert read_arguments({"timeout": None}, SamplingConfig(), default_timeout=4.0, vocab_size=9).timeout_s is None


def test_no_argument_of_the_openai_api_is_unknown():
    import inspect

    from openai.resources.chat.completions import AsyncCompletions

    from agentrl.client.arguments import CreateArguments

    theirs = set(inspect.signature(AsyncCompletions.create).parameters) - {"self", "messages", "stream"}
    assert theirs <= set(CreateArguments.__annotations__)


NAMES = st.sampled_from(["temperature", "top_p", "max_tokens", "seed", "stop", "n", "tools", "timeout", "extra_body", "zzz"])
BODIES = st.dictionaries(st.sampled_from(["top_k", "min_p", "x", "stop_token_ids"]), st.integers() | st.floats(), max_size=2)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(st.dictionaries(NAMES, SCALARS | st.lists(st.integers(), max_size=2) | BODIES, max_size=4))
def test_any_value_is_read_or_refused_by_name(arguments: dict[str, Any]):
    try:
        sampling = read(**arguments).sampling
    except (TypeError, WorkflowError):
        return
    assert sampling.max_new_tokens >= 1
    assert sampling.temperature >= 0
    assert 0 < sampling.top_p <= 1
    assert math.isfinite(sampling.temperature)
