"""One episode over HTTP: its calls, and its rewards.

Invariant: a call becomes a turn of the client's own episode, by the backend of the client. Every call runs in the block of
the door, and none outlives it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, NamedTuple, cast

import anyio
from aiohttp import web
from anyio.lowlevel import RunVar

from agentrl.client import Client, DoorSettings
from agentrl.client.arguments import overruled_sampling, without_arguments
from agentrl.client.backend import Answer, AskedCall
from agentrl.servers.http.errors import decode_body, json_bytes
from agentrl.support.concurrency import task_group
from agentrl.tokens.template.rendering import ToolSchemas
from agentrl.types import BranchPath, Speaker
from agentrl_doors.gateway.dialect import Caller, Dialect, DialectCall
from agentrl_doors.gateway.event_stream import KEEP_ALIVE_S
from agentrl_doors.gateway.fields import IgnoredFields
from agentrl_doors.gateway.items import ItemStore
from agentrl_doors.gateway.refusals import CallRefused
from agentrl_doors.gateway.sessions.calls import RecentCalls, SharedCall
from agentrl_doors.gateway.sessions.endpoint_routes import unanswered_route
from agentrl_doors.gateway.sessions.matching import ResentHistory
from agentrl_doors.gateway.sessions.rewards import set_reward
from agentrl_doors.gateway.sessions.side_calls import SIDE_CALL, OtherAnswers, is_side_call, role_by_rule

JOINED_METRIC: Final = "gateway.joined_retries"
"""Requests that got the answer of an earlier one: marked retries, and repetitions whose answer did not arrive."""
SIDE_METRIC: Final = "gateway.side_calls"
"""Side calls, by the rule of `SideCalls`."""
GREEDY_METRIC: Final = "gateway.greedy_calls"
"""Calls at temperature 0, which are not trained."""
REFUSED_REWARDS_METRIC: Final = "gateway.refused_rewards"
"""Rewards that something sent without the right to: perhaps a policy that tried to pay itself."""
PASSED_METRIC: Final = "gateway.passed_on."
"""The metric `gateway.passed_on.ROUTE`: requests that another model answered, and that are no turns."""
IGNORED_METRIC: Final = "gateway.ignored."
"""The metric `gateway.ignored.FIELD`: requests with a field that has no effect."""
MAX_ROLES: Final = 64
"""Most names of roles that clients make up in a process; turns of further ones have `OTHER_ROLE`. The same for players."""
OTHER_ROLE: Final = "other_role"
OTHER_PLAYER: Final = "other_player"
_made_up: RunVar[dict[str, set[str]]] = RunVar("agentrl_made_up_names")
_NOT_OF_THE_CALL: Final = frozenset({"stream", "stream_options"})
"""Fields that a client may change when it repeats a request."""


class Requester(NamedTuple):
    """Who sends a request, in its own words."""

    caller: Caller
    """By the marks of its program."""
    role: str = ""
    """By a path or a header of the door, like the rest; empty where there is none."""
    player: str = ""
    agent: str = ""
    """What tells agents of one role apart."""
    sample: str = ""
    """Requests with another one are other requests."""


class Session:
    """The episode of one client, as a server's routes see it.

    Args:
        client: its episode; its role, player and branch are the default of each call.
        on_answer: called with each call and its answer, whose turn is recorded, before the answer is sent whole.
        settings: branches and side calls.
        other: answers side calls; None: the policy does.
        keep_alive_s: seconds of the longest silence of a stream.
    """

    def __init__(
        self,
        client: Client,
        on_answer: Callable[[DialectCall, Answer], None] | None = None,
        *,
        settings: DoorSettings = DoorSettings(),  # noqa: B008 - frozen
        other: OtherAnswers | None = None,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self.client, self.keep_alive_s = client, keep_alive_s
        self._on_answer, self._settings, self._other = on_answer, settings, other
        side_roles = () if settings.side_calls is None else settings.side_calls.roles
        self._declared = {*settings.branches, *settings.roles, *side_roles, SIDE_CALL, client.speaker.role}
        """The roles that the run names."""
        self._branches: dict[tuple[str, str], BranchPath] = {}
        """The branches of declared roles, by role and agent."""
        self.store = ItemStore()
        """What the responses of the episode are kept in, for calls that name them by id."""
        self._recent = RecentCalls()
        self._ignored = IgnoredFields(client.episode.metrics, IGNORED_METRIC)
        self._history = ResentHistory(client.episode.turns, client.episode.metrics)
        self._send, self._receive = anyio.create_memory_object_stream[SharedCall](math.inf)

    async def run(self) -> None:
        """Run the calls, in the context of the task that opened the door, until the session is cancelled."""
        async with task_group() as tasks, self._send, self._receive:
            async for call in self._receive:
                tasks.start_soon(call.run)

    def close(self) -> None:
        """Take no more calls; `run` does so at its end."""
        self._send.close()
        self._receive.close()

    def read(self, dialect: Dialect, body: bytes) -> DialectCall:
        """Return the body of a request as a call.

        Raises:
            CallRefused: as `Dialect.read` says.
        """
        return dialect.read(body, self.store, omit_media=self._settings.images == "omit")

    def ask(self, dialect: Dialect, call: DialectCall, requester: Requester, *, is_retry: bool | None) -> SharedCall:
        """Return the call that a request makes or repeats; `RecentCalls` says which, by the mark `is_retry`."""
        identity = _identity(dialect, call, requester)
        found = self._recent.repeated(identity, is_retry=is_retry)
        if found is not None:
            self._count(JOINED_METRIC)
            return found
        self._ignored.count(call.ignored)
        asked, other = self._asked(dialect, call, requester)
        keep = partial(self._keep, dialect, call)
        after = self._recent.ending()
        found = SharedCall(self.client.backend, asked, stream=call.stream, on_answer=keep, other=other, after=after)
        self._recent.add(identity, found)
        self._send.send_nowait(found)
        return found

    async def pass_on(self, request: web.Request, route: str) -> web.StreamResponse:
        """Answer a request that is for another model, whatever the model is that it names.

        Raises:
            CallRefused: the run names no endpoint for it, or as `EndpointRoutes.answer` says.
        """
        if self._other is None:
            raise unanswered_route(route, is_replay=self.client.backend.is_replay)
        self._count(f"{PASSED_METRIC}{route}")
        return await self._other.routes.answer(request, route)

    def awaits(self, dialect: Dialect, call: DialectCall, requester: Requester) -> bool:
        """Return whether an equal request was made, and its answer has not arrived."""
        return self._recent.awaited(_identity(dialect, call, requester)) is not None

    def _asked(self, dialect: Dialect, call: DialectCall, requester: Requester) -> tuple[AskedCall, OtherAnswers | None]:
        """Return what a new request asks, and who answers it in the place of the policy."""
        own, caller, rule = self.client.speaker, requester.caller, self._settings.side_calls
        role = requester.role or caller.role
        if not role and self._settings.roles:
            role = role_by_rule(self._settings.roles, call)
        role = role or own.role
        is_side = rule is not None and is_side_call(rule, call, role)
        if is_side:
            self._count(SIDE_METRIC)
            role = role or SIDE_CALL
        other = self._other if is_side else None
        branch = self._branch_of(role, requester.agent or caller.agent)
        speaker = Speaker(
            role=_known_name(role, self._declared, OTHER_ROLE),
            player=_known_name(requester.player or own.player, (own.player,), OTHER_PLAYER),
            branch=branch,
            dialect=dialect.name,
            client=caller.client,
            left_out=is_side and rule is not None and not rule.train,
        )
        arguments = dict(call.arguments) if call.model is None else {"model": call.model, **call.arguments}
        if other is None:
            arguments = self._with_run_sampling(arguments, is_trained=not speaker.left_out)
        if other is not None:  # which answers as a whole
            arguments.pop("stream_options", None)
            return AskedCall(call.messages, arguments, speaker, self.client.timeout), other
        if call.stream:  # answers say how many tokens they took, and some endpoints count only when they are asked to
            arguments["stream_options"] = {"include_usage": True}
        messages = self._history.restored(call.messages, call.arguments.get("tools"))
        return AskedCall(messages, arguments, speaker, self.client.timeout), None

    def _with_run_sampling(self, arguments: dict[str, object], *, is_trained: bool) -> dict[str, object]:
        """Return the arguments of a call without those that the run overrules; counts the latter."""
        sampling, backend = self.client.backend.run_sampling, self.client.backend
        if sampling is None or backend.is_replay:
            return arguments
        if sampling.of_programs == "run":
            with self.client.episode.refusals():
                overruled = overruled_sampling(arguments, sampling, is_untrained=not is_trained)
            self._ignored.count(overruled)
            arguments = without_arguments(arguments, overruled.keys())
        if is_trained and arguments.get("temperature", sampling.temperature) == 0:
            self._count(GREEDY_METRIC)
        return arguments

    def _branch_of(self, role: str, agent: str) -> BranchPath:
        """Return the branch in which an agent speaks: one of its own if its role is declared."""
        own = self.client.speaker.branch
        if role not in self._settings.branches:
            return own
        if (role, agent) not in self._branches:
            self._branches[role, agent] = self.client.episode.open_branch(own)
        return self._branches[role, agent]

    def count_tokens(self, call: DialectCall) -> int:
        """Return the number of tokens that the prompt of a call has; nothing is sent.

        Raises:
            CallRefused: the model is out of sight.
        """
        if self.client.backend.connection is not None:
            raise CallRefused("count_tokens needs the model's tokenizer, and this episode asks an endpoint", status=404)
        tools = cast("ToolSchemas | None", call.arguments.get("tools"))
        messages = self._history.restored(call.messages, tools)
        return self.client.graph.prepare(messages, tools, self.client.speaker.branch).context.size

    @property
    def takes_rewards(self) -> bool:
        """Whether rewards may be set over HTTP."""
        return self._settings.rewards != "none"

    def refused_reward(self) -> CallRefused:
        """Return the refusal of a reward by one who may only sample, and count it."""
        self._count(REFUSED_REWARDS_METRIC)
        why = (
            "the key of an episode samples and sets no reward; the reward URL has a secret of its own"
            if self.takes_rewards
            else "no reward is taken over HTTP here: what the run names (a grader, a result file, exit statuses, tests) "
            "sets it; `workflow.rewards` lets a trusted program do it"
        )
        return CallRefused(why, status=403)

    def reward(self, body: bytes) -> None:
        """Set the reward of one answer, or the final one, as `{"reward": 1.0, "response_id": "chatcmpl-..."}` says.

        Raises:
            RewardError: the value is no reward.
            CallRefused: the body is something else, no answer of this episode has the id, there is a reward already, or
                the final reward is not set here (403).
        """
        fields = decode_body(body, dict[str, object])
        unknown = sorted(fields.keys() - {"reward", "response_id"})
        if unknown or "reward" not in fields:
            raise CallRefused(
                'a reward is {"reward": 1.0}, with "response_id" that of one answer; '
                + (f"got the fields {', '.join(unknown)}, too" if unknown else "the body has no reward")
            )
        if fields.get("response_id") is None and self._settings.rewards != "all":
            self._count(REFUSED_REWARDS_METRIC)
            raise CallRefused(
                'rewards of single answers alone are taken here: send the "response_id"; the run names what sets the final '
                "reward",
                status=403,
            )
        branches = (self.client.speaker.branch, *self._branches.values())
        set_reward(self.client.episode, fields["reward"], fields.get("response_id"), branches)

    def _keep(self, dialect: Dialect, call: DialectCall, answer: Answer) -> None:
        dialect.keep(call, answer, self.store)
        if self._on_answer is not None:
            self._on_answer(call, answer)

    def _count(self, name: str) -> None:
        metrics = self.client.episode.metrics
        metrics[name] = metrics.get(name, 0.0) + 1.0


def _known_name(name: str, declared: Collection[str], other: str) -> str:
    """Return the name that a turn records: metrics have a key for each, so names that clients make up are bounded."""
    if not name or name in declared:
        return name
    try:
        made_up = _made_up.get()
    except LookupError:
        _made_up.set(made_up := {})
    known = made_up.setdefault(other, set())
    if name not in known and len(known) >= MAX_ROLES:
        return other
    known.add(name)
    return name


def _identity(dialect: Dialect, call: DialectCall, requester: Requester) -> bytes:
    body = {name: value for name, value in call.body.items() if name not in _NOT_OF_THE_CALL}
    marks = repr((dialect.name, *requester)).encode("ascii", "backslashreplace")
    return hashlib.blake2b(marks + json_bytes(body, sort_keys=True), digest_size=16).digest()
