"""The keys and the address of an online run: both are read before anything is made, and keys again when they change."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.servers.listening import check_listening
from agentrl_doors.online.client_keys import KeyRing, add_key, read_key_hashes


def test_keys_come_and_go_while_a_run_serves(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    web = add_key(file, "web")
    read = partial(read_key_hashes, file, None)
    ring = KeyRing(read(), requests_per_minute=1, max_calls=1, file=file, read=read)
    before = ring.client(web)
    app = add_key(file, "app")
    assert ring.client(app).name == "app"
    assert ring.client(web) is before, "a key that stays keeps its counts"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("half a li")
    assert ring.accepts(web)
    assert ring.accepts(app)
    file.write_text(lines[1])
    assert not ring.accepts(web)
    assert ring.accepts(app)


@pytest.mark.parametrize("name", ["web/", "web/all", "/calls", "web/calls/feedback", "a b", ""])
def test_a_name_opens_calls_feedback_or_both(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="perhaps with /calls or /feedback behind it"):
        add_key(tmp_path / "keys.txt", name)
    opened = {each: add_key(tmp_path / "keys.txt", each) for each in ("web", "web/calls", "web/feedback")}
    ring = KeyRing(read_key_hashes(tmp_path / "keys.txt", None), requests_per_minute=1, max_calls=1)
    assert {ring.client(key).name for key in opened.values()} == {"web"}


def test_an_address_that_is_taken_is_found_before_anything_is_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        check_listening("127.0.0.1", taken.getsockname()[1])
    check_listening("127.0.0.1", 0)
    with pytest.raises(ConfigError, match="cannot listen"):
        check_listening("203.0.113.1", 0)  # an address of documentation, which no machine has
