"""The server of an online run: the dialects for its clients, and `POST /feedback`.

Invariant: no route is reached without the key of a client, and no client sees the conversations of another. No key and no
content of a call is in a message or a log.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final

import orjson
from aiohttp import web

from agentrl.servers.http.errors import decode_body, json_reply
from agentrl.servers.listening import Connections, listening, sent_key
from agentrl_doors.gateway.dialect import Dialect, DialectCall
from agentrl_doors.gateway.dialects import COUNT_ROUTE, dialect_of
from agentrl_doors.gateway.items import ItemStore
from agentrl_doors.gateway.refusals import CallRefused
from agentrl_doors.gateway.sessions.server import (
    Place,
    answer_call,
    answer_other,
    app_of,
    place_of,
    requester_of,
    retry_mark,
)
from agentrl_doors.online.client_keys import ClientKey, KeyRing
from agentrl_doors.online.conversations import Conversation, check_name, name_of
from agentrl_doors.online.traffic import Feedback, Traffic

CONVERSATION_HEADER: Final = "x-agentrl-conversation"
"""The id of a conversation, in requests and answers."""
_FEEDBACK_FIELDS: Final = frozenset({"reward", "response_id", "conversation_id", "final"})


class OnlineServer:
    """Answers the clients of a run."""

    def __init__(self, traffic: Traffic, keys: KeyRing) -> None:
        self._traffic, self._keys = traffic, keys

    def app(self, connections: Connections) -> web.Application:
        """Return the application."""
        return app_of(self._answer, self._keys.accepts, connections)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        place, client = place_of(request), self._keys.client(sent_key(request))
        if request.method != "POST":
            return answer_other(request, place.route)
        client.check_route(place.route)
        client.count_request()
        if place.route == "feedback":
            return await self._feedback(client.name, await request.read())
        dialect = dialect_of(place.route)
        if dialect is None:
            raise CallRefused(
                f"there is no POST /{place.route:.80} here; there is POST feedback beside the model's", status=404
            )
        if place.route == COUNT_ROUTE:
            call = dialect.read(await request.read(), ItemStore())
            return json_reply({"input_tokens": self._traffic.count_tokens(call)})
        with client.running_call():
            return await self._model_call(request, client, place, dialect)

    async def _model_call(
        self, request: web.Request, client: ClientKey, place: Place, dialect: Dialect
    ) -> web.StreamResponse:
        conversation, call = self._conversation(request, client.name, place, dialect, await request.read())
        session = conversation.session
        assert session is not None, "requests join conversations of this process alone"
        self._traffic.touch(conversation)
        try:
            headers = {CONVERSATION_HEADER: conversation.name}
            return await answer_call(request, dialect, call, session, requester_of(request, dialect, call, place), headers)
        finally:
            self._traffic.abandon(conversation)

    def _conversation(
        self, request: web.Request, client: str, place: Place, dialect: Dialect, body: bytes
    ) -> tuple[Conversation, DialectCall]:
        """Return the conversation of a request, perhaps a new one, and its call."""
        conversations, fields = self._traffic.conversations, _fields_of(body)
        name = name_of(place.secret, request.headers.get(CONVERSATION_HEADER), fields)
        previous = fields.get("previous_response_id")
        found = None if name is None else conversations.named(client, name)
        if found is None and isinstance(previous, str):
            found = conversations.of_response(client, previous)
        session = None if found is None else found.session
        call = dialect.read(body, ItemStore() if session is None else session.store)
        if found is not None and session is not None:
            return found, call
        if name is None:
            found = self._repeated(request, client, place, dialect, call, body) or conversations.continued(
                client, call.messages
            )
            if found is not None and found.session is not None:
                return found, call
        conversation = self._traffic.open(client, name)
        conversations.remember_opening(conversation, body)
        return conversation, call

    def _repeated(
        self, request: web.Request, client: str, place: Place, dialect: Dialect, call: DialectCall, body: bytes
    ) -> Conversation | None:
        """Return the conversation whose first request this one makes again, by its mark.

        Without the mark, or after the answer arrived, it may be that of another user who says the same.
        """
        found = self._traffic.conversations.opened_by(client, body) if retry_mark(request) else None
        if found is None or found.session is None:
            return None
        requester = requester_of(request, dialect, call, place)
        return found if found.session.awaits(dialect, call, requester) else None

    async def _feedback(self, client: str, body: bytes) -> web.Response:
        fields = decode_body(body, dict[str, object])
        feedback, identity = _read_feedback(fields)
        conversations = self._traffic.conversations
        by_id = conversations.of_response if feedback.response_id is not None else conversations.named
        conversation = by_id(client, identity)
        if conversation is None and conversations.has_ended(client, identity):
            raise CallRefused(
                "the conversation has ended, by its final feedback or because nobody used it; no feedback is taken any more",
                status=409,
            )
        if conversation is None:
            raise CallRefused(f"no conversation of this key has the id {identity!r:.120}", status=404)
        await self._traffic.accept(conversation, feedback)
        return json_reply({"object": "feedback", "accepted": True, "conversation_id": conversation.name})


@asynccontextmanager
async def serve_clients(
    traffic: Traffic, *, keys: KeyRing, host: str, port: int, on_ready: Callable[[str], None]
) -> AsyncGenerator[str]:
    """Serve the clients of a run inside the block, and yield the URL; `on_ready` is called with it, too."""
    connections = Connections()
    app = OnlineServer(traffic, keys).app(connections)
    async with listening(app, connections, host=host, port=port, api_key="those of the clients") as url:
        on_ready(url)
        yield url


def _fields_of(body: bytes) -> Mapping[str, object]:
    """Return the fields of a body; none where it is no JSON object, which its dialect refuses."""
    try:
        found: object = orjson.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _read_feedback(fields: Mapping[str, object]) -> tuple[Feedback, str]:
    """Return a feedback, and the id that it is for.

    Raises:
        CallRefused: the body says something else.
    """
    response, conversation = fields.get("response_id"), fields.get("conversation_id")
    unknown = sorted(fields.keys() - _FEEDBACK_FIELDS)
    if unknown or "reward" not in fields or (response is None) == (conversation is None):
        got = ", ".join(name[:80] for name in fields) or "no field"
        raise CallRefused(
            'a feedback is {"reward": 1.0} with either "response_id" or "conversation_id", and "final": true where a '
            f"response's reward is that of the whole conversation; got {got}"
        )
    is_final = fields.get("final", response is None)
    if not isinstance(is_final, bool) or (response is None and not is_final):
        raise CallRefused('"final" is true or false; the reward of a conversation is always final, so give a response_id')
    if response is None:
        return Feedback(value=fields["reward"], response_id=None, is_final=True), check_name(conversation)
    if not isinstance(response, str):
        raise CallRefused(f"response_id is the id of an answer, as text; got {response!r:.80}")
    return Feedback(value=fields["reward"], response_id=response, is_final=is_final), response
