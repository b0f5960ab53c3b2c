"""A few episodes of each step as text, for people to read.

Invariant: the text holds every token of the turns as the model saw it, control tokens included, up to `MAX_TEXT` characters.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from agentrl.episode.summary import is_success
from agentrl.observe.trackers.base import Choice, SampledEpisode
from agentrl.support.foreign import shortened, visible
from agentrl.types import Trajectory

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the text of token ids."""


class Chosen(NamedTuple):
    """An episode of a sample."""

    choice: Choice
    episode: Trajectory

    def described(self, decode: Decode) -> SampledEpisode:
        """Return it with its text."""
        return SampledEpisode(
            choice=self.choice,
            episode_id=self.episode.episode_id,
            task_id=self.episode.task_id,
            episode_return=self.episode.episode_return,
            success=is_success(self.episode),
            text=episode_text(self.episode, decode),
        )


def choose_episodes(episodes: Sequence[Trajectory], count: int, *, seed: str) -> list[Chosen]:
    """Return the best episode, the worst, and others at random by `seed`, `count` in all; failed ones are left out."""
    done = [episode for episode in episodes if episode.failure is None]
    ranked = sorted(done, key=lambda episode: episode.episode_return, reverse=True)
    rest = ranked[1:-1]
    drawn = random.Random(seed).sample(rest, min(len(rest), max(0, count - 2)))
    best, worst = [Chosen("best", one) for one in ranked[:1]], [Chosen("worst", one) for one in ranked[1:][-1:]]
    return [*best, *worst, *(Chosen("random", one) for one in drawn)][:count]


def episode_text(episode: Trajectory, decode: Decode) -> str:
    """Return an episode as text: a line about it, then each turn with what was new in its context, and its answer."""
    lines = [
        f"episode {episode.episode_id}, task {episode.task_id}: return {episode.episode_return:g}, "
        f"{'success' if is_success(episode) else 'no success'}, ended by {episode.stop_reason}"
    ]
    for number, turn in enumerate(episode.turns):
        after = "" if turn.parent is None else f" after turn {turn.parent}"
        fork = "" if turn.fork is None else f", a fork ({turn.fork})"
        reward = "" if turn.reward is None else f", reward {turn.reward:g}"
        player = f", {turn.player}" if turn.player else ""
        versions = sorted({span.version for span in turn.spans})
        by = f", version {', '.join(map(str, versions))}" if versions else ""
        lines.append(f"--- turn {number}{after}{fork}{player}{by}{reward}")
        lines.append(decode(turn.context_ids.tolist()) + "[[" + decode(turn.output_ids.tolist()) + "]]")
    lines.append("What the model wrote stands in [[ ]].")
    return shortened(visible("\n".join(lines)))
