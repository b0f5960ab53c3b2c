"""Conversations with users as the source of the groups of a run.

Invariant: a conversation is one episode and one group. It is trained once, or left and counted: `no_feedback`,
`crowded_out`, `no_answer`, `over_age`, `unverified`. Feedback is on the disk before it is confirmed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup

from agentrl.client import Client, EpisodeSettings, PolicyBackend
from agentrl.client.backend import Answer
from agentrl.config import RunConfig
from agentrl.engine.buffer import Ticket
from agentrl.engine.parts import GroupIntake
from agentrl.errors import RunStopped
from agentrl.support.concurrency import task_group
from agentrl.tokens.renderer import Renderer
from agentrl.types import Group, StopReason, Turn
from agentrl_doors.gateway.dialect import DialectCall
from agentrl_doors.gateway.refusals import CallRefused
from agentrl_doors.gateway.sessions.rewards import find_turn, plain_reward, set_reward
from agentrl_doors.gateway.sessions.session import Session
from agentrl_doors.online.conversation_files import (
    ConversationFiles,
    EndLine,
    FeedbackLine,
    OpeningLine,
    StoredConversation,
)
from agentrl_doors.online.conversations import TRAFFIC, Conversation, OpenConversations, episode_name, restored_episode

_ENDING: Final = "the run is ending and takes no more conversations; ask the next one"
_LATER_S: Final = 30
"""Seconds after which a client may try again where too many conversations are open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSettings:
    """The rules for conversations."""

    idle_s: float = 1800.0
    """Seconds after the last request or feedback at which a conversation ends."""
    max_conversations: int = 1024
    """Conversations that are open at once, those that wait for feedback included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """A reward from a client."""

    value: object
    response_id: str | None
    """None: the reward is that of the whole conversation."""
    is_final: bool
    """Whether it is the reward of the whole conversation, which ends with it."""


class Traffic:
    """The conversations of a run, as its source of groups and as its server sees them.

    Args:
        renderer: chat template and tokenizer of the policy.
        run: the run; its rollout section bounds the turns and tokens of a conversation.
        settings: the rules for conversations.
        served: serves the traffic inside its block, such as `server.serve_clients`.
    """

    def __init__(
        self,
        renderer: Renderer,
        run: RunConfig,
        settings: TrafficSettings,
        served: Callable[[Traffic], AbstractAsyncContextManager[object]],
    ) -> None:
        self._renderer, self._run, self._settings, self._served = renderer, run, settings, served
        self.conversations = OpenConversations()
        """The open ones."""
        self._files = ConversationFiles(run.run_dir)
        self._ids: dict[int, str] = {}
        """The conversations that are neither trained nor left, by the number of their group."""
        self._running: tuple[GroupIntake, TaskGroup] | None = None
        self._added = anyio.Event()

    async def fill(self, intake: GroupIntake) -> None:
        """Take up what an earlier process left, and serve until the buffer is closed."""
        try:
            async with task_group() as tasks:
                self._running = intake, tasks
                for stored in self._files.take_up(intake.resumed_step):
                    self._take_up(intake, stored)
                tasks.start_soon(self._end_idle)
                async with self._served(self):
                    await intake.buffer.closed()
                tasks.cancel_scope.cancel()
        finally:
            self._running = None
            for conversation in self.conversations:
                conversation.flight.close()
                if conversation.session is not None:
                    conversation.session.close()  # where its task was cancelled before it began

    def is_idle(self) -> bool:
        """Return whether the trainer waits for conversations, and no model call runs."""
        is_awaited = self._running is not None and self._running[0].buffer.is_awaited
        return is_awaited and not any(each.is_busy for each in self.conversations)

    def dropped(self, index: int) -> None:
        """Delete a conversation that will not be trained."""
        self._files.forget(self._ids.pop(index))

    async def taken(self, step: int, groups: Sequence[Group]) -> Sequence[Group]:
        """Record what a step trains; its conversations are compared with each other, as one group."""
        await self._files.take(step, [self._ids.pop(group.index) for group in groups])
        episodes = tuple(episode for group in groups for episode in group.episodes)
        version = min(group.admitted_version for group in groups)
        return (Group(index=groups[0].index, task=TRAFFIC, episodes=episodes, admitted_version=version),)

    def open(self, client: str, name: str | None) -> Conversation:
        """Return a new conversation of a client; where too many are open, an unused one gives way.

        Raises:
            CallRefused: a call runs in each of too many, or the run is ending (503).
        """
        intake, tasks = self._parts()
        if len(self.conversations) >= self._settings.max_conversations:
            self._make_room(client)
        identity, flight, ticket = uuid4().hex, ExitStack(), _ticket(intake)
        episode_id = episode_name(identity, ticket)
        on_turn = flight.enter_context(intake.flight(episode_id, TRAFFIC.id, ticket.index))
        policy = self._policy(intake, episode_id, on_turn)
        conversation = Conversation(identity, client=client, name=name, episode=policy.episode, ticket=ticket, flight=flight)
        session = Session(Client(policy), on_answer=partial(self._answered, conversation))
        conversation.session = session
        self._files.add(identity, OpeningLine(id=identity, client=client, name=conversation.name))
        self._add(conversation)
        tasks.start_soon(_serve_calls, conversation, session)
        return conversation

    def _make_room(self, client: str) -> None:
        """End the conversation that gives way to a new one of `client`.

        Of the client itself where it holds its share, else of the one that holds most: the one that nobody has used for
        the longest time, those without feedback first.

        Raises:
            CallRefused: a model call runs in each (503).
        """
        held = Counter(each.client for each in self.conversations)
        share = max(1, self._settings.max_conversations // len({*held, client}))
        owners = [client] if held[client] >= share else [name for name, _ in held.most_common()]
        for owner in owners:
            idle = [each for each in self.conversations if each.client == owner and not each.is_busy]
            if idle:
                self._end_unused(min(idle, key=lambda each: (each.has_feedback, each.expires_at)), "crowded_out")
                return
        raise CallRefused(
            f"{len(self.conversations)} conversations are open, the most that this server holds, and none of those that "
            "could give way is idle; call again later",
            status=503,
            retry_after_s=_LATER_S,
        )

    def count_tokens(self, call: DialectCall) -> int:
        """Return the number of tokens of a call's prompt; the call need not belong to a conversation."""
        intake, _ = self._parts()
        with closing(Session(Client(self._policy(intake, "", None)))) as session:
            return session.count_tokens(call)

    def touch(self, conversation: Conversation) -> None:
        """Take note that somebody uses a conversation, which puts off its end."""
        conversation.expires_at = anyio.current_time() + self._settings.idle_s

    def abandon(self, conversation: Conversation) -> None:
        """End a conversation whose first request failed."""
        if conversation.episode.is_open and not conversation.episode.turns and not conversation.is_busy:
            self._end(conversation)

    async def accept(self, conversation: Conversation, feedback: Feedback) -> None:
        """Set a reward; it is on the disk when this returns.

        Raises:
            RewardError: the value is no reward.
            CallRefused: the conversation has no answer yet, has ended, or has this reward already.
            RunStopped: it cannot be written; the run ends.

        Cancellation: shielded, for the time of a write.
        """
        episode, turn, value = conversation.episode, None, plain_reward(feedback.value)
        if not episode.turns:
            raise CallRefused("the conversation has no answer yet, so there is nothing to reward", status=409)
        if feedback.is_final:
            set_reward(episode, value, None)
        else:
            turn = find_turn(episode, feedback.response_id or "")
            branch = () if turn is None else episode.turns[turn].branch
            set_reward(episode, value, feedback.response_id, (branch,))
        at = None if turn is None else episode.turns[turn].rewarded_at
        line = FeedbackLine(turn=turn, reward=value, at=at)
        self.touch(conversation)
        try:
            with anyio.CancelScope(shield=True):
                self._files.add(conversation.id, line)
                await self._files.sync(conversation.id)
        except RunStopped as error:
            _, tasks = self._parts()
            tasks.start_soon(_raise, error)
            raise
        if feedback.is_final and episode.is_open:
            self._end(conversation)

    def _parts(self) -> tuple[GroupIntake, TaskGroup]:
        if self._running is None:
            raise CallRefused(_ENDING, status=503)
        return self._running

    def _policy(self, intake: GroupIntake, episode_id: str, on_turn: Callable[[Turn], None] | None) -> PolicyBackend:
        rollout = self._run.rollout
        settings = EpisodeSettings(
            episode_id=episode_id,
            task_id=TRAFFIC.id,
            max_turns=rollout.max_turns,
            max_episode_tokens=rollout.max_episode_tokens,
            on_turn=on_turn,
        )
        return PolicyBackend(intake.backend, self._renderer, self._run.sampling, settings, seed=self._run.seed)

    def _add(self, conversation: Conversation) -> None:
        self._ids[conversation.ticket.index] = conversation.id
        self.conversations.add(conversation)
        self.touch(conversation)
        self._added.set()
        self._added = anyio.Event()

    def _answered(self, conversation: Conversation, call: DialectCall, answer: Answer) -> None:
        episode = conversation.episode
        turn = episode.turn_of(answer.id)
        assert turn is not None, "an answer is a recorded turn"
        self._files.add_turn(conversation.id, answer.id, episode.turns[turn])
        self.conversations.answered(conversation, call.messages, answer)
        self.touch(conversation)

    def _take_up(self, intake: GroupIntake, stored: StoredConversation) -> None:
        """Continue a conversation of an earlier process, whose clients can only give feedback."""
        opened, flight, ticket = stored.opened, ExitStack(), _ticket(intake)
        episode = restored_episode(stored, ticket)
        on_turn = flight.enter_context(intake.flight(episode.id, TRAFFIC.id, ticket.index))
        for turn in episode.turns:
            on_turn(turn)
        conversation = Conversation(
            opened.id, client=opened.client, name=opened.name, episode=episode, ticket=ticket, flight=flight
        )
        self._add(conversation)
        for answer, _ in stored.answers:
            self.conversations.add_answer(conversation, answer)
        if stored.is_ended or episode.final_reward is not None:
            self._end(conversation)

    async def _end_idle(self) -> None:
        """End each conversation that nobody has used for `idle_s`."""
        while True:
            soonest = min((each.expires_at for each in self.conversations), default=math.inf)
            with anyio.move_on_at(soonest):
                await self._added.wait()
            for conversation in self.conversations:
                if conversation.is_busy:
                    self.touch(conversation)
                elif conversation.expires_at <= anyio.current_time():
                    self._end_unused(conversation)

    def _end_unused(self, conversation: Conversation, silent: str = "no_feedback") -> None:
        """End a conversation that no client ended; without feedback it is dropped for the reason `silent`."""
        if conversation.has_feedback:
            self._files.add(conversation.id, EndLine())
        self._end(conversation, silent)

    def _end(self, conversation: Conversation, silent: str = "no_feedback") -> None:
        """End an episode, and put it into the buffer or drop it."""
        intake, _ = self._parts()
        episode, ticket, has_feedback = conversation.episode, conversation.ticket, conversation.has_feedback
        trajectory = replace(
            episode.close(episode.calls.limit_reached or StopReason.COMPLETED, None, None),
            task=TRAFFIC,
            started_s=next((turn.started_s for turn in episode.turns), None),
            ended_s=time.perf_counter(),
        )
        conversation.scope.cancel()
        self.conversations.close(conversation)
        conversation.flight.close()
        intake.release(episode.id)
        if not has_feedback:
            intake.buffer.drop(ticket.index, silent if episode.turns else "no_answer")
            return
        intake.on_episode(trajectory, ticket.index)
        newest = max(span.version for turn in trajectory.turns for span in turn.spans)
        if newest < intake.clock.trainer_version - self._run.algorithm.max_staleness:
            intake.buffer.drop(ticket.index, "over_age")
            return
        group = Group(index=ticket.index, task=TRAFFIC, episodes=(trajectory,), admitted_version=ticket.version)
        intake.buffer.complete(group)


async def _serve_calls(conversation: Conversation, session: Session) -> None:
    with conversation.scope:
        await session.run()


async def _raise(error: RunStopped) -> None:
    raise error


def _ticket(intake: GroupIntake) -> Ticket:
    ticket = intake.buffer.admit_now()
    if ticket is None:
        raise CallRefused(_ENDING, status=503)
    return ticket
