"""The ends of episodes, told to the servers that kept their caches.

Invariant: no episode waits for these messages or fails by them. A missed message costs only cache priority: a server evicts
the caches of open sessions last, and a flush removes them as well.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import NoReturn

import anyio

from agentrl.errors import ServerError
from agentrl.inference.pool.members import Members, State

logger = logging.getLogger(__name__)
_SAY_EVERY = 100
"""Ends that a server missed between two warnings about it, the first of which comes at once."""


async def end_sessions(members: Members) -> NoReturn:
    """Tell each server which of its episodes have ended, as they end; runs until cancelled.

    A server that does not serve gets no message: a restart or new weights make it forget its cache anyway. The calls have
    the deadlines of control calls.
    """
    missed = Counter[str]()
    while True:
        await members.has_ended.wait()
        # Replaced before the queue is emptied, so that an end that comes meanwhile wakes the next round.
        members.has_ended = anyio.Event()
        while members.ended:
            episode_id, member = members.ended.popleft()
            if member.state is not State.SERVING:
                continue
            try:
                await member.server.end_session(episode_id)
            except ServerError as error:
                # A server without this route misses every end, and a line for each would bury the log.
                if missed[member.url] % _SAY_EVERY == 0:
                    logger.warning(
                        "%s was not told that an episode ended, and keeps its cache longer: %s", member.url, error
                    )
                missed[member.url] += 1
