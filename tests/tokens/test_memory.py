"""What the graphs of running episodes hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentrl.tokens.renderer import Renderer
from agentrl.tokens.verify import verify
from benchmarks.memory import measure
from tests.tokens.dialogues import user
from tests.tokens.play import Player


@pytest.mark.parametrize(("turns", "megabytes"), [(10, 20), (32, 28)])
def test_graphs_of_256_episodes_of_4096_tokens_stay_small_beside_the_text_of_their_conversations(turns: int, megabytes: int):
    found = measure(16, 4096, turns)
    assert found["arrays_bytes_per_token"] <= 8
    assert found["graphs_without_conversation_text_mb"] * 256 / 16 <= megabytes


def test_a_context_too_long_to_keep_its_json_is_sent_and_proved_like_any_other(
    renderer_of: Callable[..., Renderer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.tokens.graph._KEPT_JSON", 40)
    player, messages = Player(renderer_of("qwen25")), [user("1?")]
    for number in range(6):
        messages = [*messages, player.ask(messages, f"answer {number}", version=1), user(f"and {number}?")]
    player.ask([*messages[:4], user("another way?")], "a fork", version=2)
    player.ask(messages, "the end", version=2)
    assert max(len(sent) for sent in player.sent) > 80
    verify(player.trajectory())
