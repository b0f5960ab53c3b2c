"""Side calls: how they and other roles are told from the main agent's calls, and the model that may answer them.

Invariant: a side call is a turn of the episode with its messages, its answer and a mark, whoever answers it. A turn of
another model has no tokens and is never trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Final
from uuid import uuid4

import aiohttp
from openai import AsyncOpenAI

from agentrl.client import Client, EndpointBackend, EpisodeSettings, OtherModel, RoleRule, SideCalls
from agentrl.client.backend import Answer, AskedCall
from agentrl.errors import ConfigError
from agentrl.tokens.messages import field_getter, text_of
from agentrl.types import ForkReason
from agentrl_doors.gateway.dialect import DialectCall
from agentrl_doors.gateway.sessions.endpoint_routes import EndpointRoutes

SIDE_CALL: Final = "side_call"
"""The role of a side call that has none of its own."""


def is_side_call(rule: SideCalls, call: DialectCall, role: str) -> bool:
    """Return whether a call of an agent with this role is a side call."""
    return rule.is_one(model=call.model, role=role, prompt=_first_text(call) if rule.prompts else "")


def role_by_rule(rules: Mapping[str, RoleRule], call: DialectCall) -> str:
    """Return the role of a call that says none; empty where no rule finds it."""
    prompt = _first_text(call)
    return next((role for role, rule in rules.items() if any(each in prompt for each in rule.prompts)), "")


def _first_text(call: DialectCall) -> str:
    first = field_getter(call.messages[0])("content") if call.messages else None
    return text_of(first, "messages[0]")


class OtherAnswers:
    """Answers side calls of one episode by a model that is not the policy.

    Args:
        client: of the episode, whose budget of turns counts them, too.
        connection: to the endpoint.
        model: its name there.
        routes: the other routes of the endpoint.
    """

    def __init__(self, client: Client, connection: AsyncOpenAI, model: str, routes: EndpointRoutes) -> None:
        self._client, self._connection, self._model, self.routes = client, connection, model, routes

    async def answer(self, asked: AskedCall) -> Answer:
        """Return the model's answer, which is a turn of the episode.

        Cancellation: the request is aborted and nothing is recorded.
        """
        episode, backend = self._client.episode, self._client.backend
        with episode.start_call() as running:
            sent_after, sent_at, started_s = len(episode.turns), next(episode.clock), time.perf_counter()
            one_call = EpisodeSettings(episode_id=episode.id, task_id="")
            asking = EndpointBackend(self._connection, self._model, one_call)
            given = await asking.answer(asked)
            episode.check_open()
            identity = f"chatcmpl-{uuid4().hex}"  # another endpoint may give ids that this episode has already
            native = None if given.native is None else given.native.model_copy(update={"id": identity})
            answer = replace(given, id=identity, native=native)
            fork = ForkReason.NEW_CONVERSATION if episode.turns else None
            answered = replace(
                asking.episode.turns[0], sent_after=sent_after, sent_at=sent_at, started_s=started_s, fork=fork
            )
            backend.adopt(answered)
            episode.announce(identity, 0)
            running.complete()
        return answer


@asynccontextmanager
async def other_answers(client: Client, rule: SideCalls | None) -> AsyncGenerator[OtherAnswers | None]:
    """Yield the model that answers side calls; None where the policy or a record answers them."""
    if rule is None or not isinstance(rule.answer, OtherModel) or client.backend.is_replay:
        yield None
        return
    variable = rule.answer.api_key_env
    key = "none" if variable is None else os.environ.get(variable)
    if not key:
        raise ConfigError(f"side_calls.answer.api_key_env: the environment variable {variable} is not set")
    async with (
        AsyncOpenAI(base_url=rule.answer.base_url, api_key=key) as connection,
        aiohttp.ClientSession(trust_env=True) as http,
    ):
        with closing(EndpointRoutes(http, rule.answer, key)) as routes:
            yield OtherAnswers(client, connection, rule.answer.model, routes)
