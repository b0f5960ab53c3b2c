"""Play a workflow without a model, for tests: `trajectory = play(Calculator, task, replies)`.

Invariant: the workflow meets the real client, and its tools, environments and graders run. Nothing outside this process
answers for the model, and the same replies give the same trajectory.
"""

from __future__ import annotations

from agentrl.testing.playing import TIMEOUT_S, CalledTool, Reply, call, check_replay, play, play_async

__all__ = ["TIMEOUT_S", "CalledTool", "Reply", "call", "check_replay", "play", "play_async"]
