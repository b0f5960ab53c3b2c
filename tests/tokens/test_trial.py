"""A chat template is tried out in a fork, under limits."""

from __future__ import annotations

import resource
from collections.abc import Callable
from functools import partial

import pytest

from agentrl.errors import ConfigError
from agentrl.tokens.template import probing
from agentrl.tokens.template.rendering import ChatTemplate

DOUBLING = "{% set ns = namespace(x='abcdefgh') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
MEMORY = {
    "doubling when the conversation is long": "{% if messages | length > 20 %}" + DOUBLING + "{% endif %}",
    "a constant": "{{ 'x' | center(4000000000) }}",
    "replace": "{{ (messages[0].role * 10000) | replace('s', 'b' * 100000) }}",
}


def build(source: str) -> Callable[[], ChatTemplate]:
    return partial(ChatTemplate, {"default": source}, special_tokens={}, options={})


@pytest.mark.parametrize("source", MEMORY.values(), ids=MEMORY)
def test_a_template_that_takes_a_lot_of_memory_is_refused_and_takes_it_from_a_fork(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=r"model: .* takes too much memory for .*; the limits are 1024 MiB and 99 s"):
        probing.try_out(build(source), "model", cpu_seconds=99)  # more than a slow machine needs to fill the memory
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # kB


def test_a_template_that_never_ends_is_refused() -> None:
    slow = "{% for i in range(99999) %}{{ range(99999) | list | sort | join | length }}{% endfor %}"
    with pytest.raises(ConfigError, match="too much time"):
        probing.try_out(build(slow), "model", cpu_seconds=1)


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ raise_exception('no') }}", "{{ messages.nothing.at.all }}"]
)
def test_what_a_usual_template_writes_or_refuses_is_left_to_its_use(source: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)
    probing.try_out(build(source), "model")
    assert (resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)) == limits
