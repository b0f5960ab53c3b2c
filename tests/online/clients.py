"""Clients of an online run over plain HTTP, without an event loop."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from typing import Any

from tests.support.cli import END_S


def asked(url: str, key: str, text: str = "Hello.") -> tuple[str, str]:
    """Ask something in a new conversation, and return the answer and the id of the conversation."""
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    with urllib.request.urlopen(json_request(f"{url}/v1/chat/completions", key, body), timeout=END_S) as answer:
        content = json.loads(answer.read())["choices"][0]["message"]["content"]
        return content or "", str(answer.headers["x-agentrl-conversation"])


def posted(url: str, key: str, body: Mapping[str, object]) -> dict[str, Any]:
    """Return the answer to a request."""
    with urllib.request.urlopen(json_request(url, key, body), timeout=END_S) as answer:
        return json.loads(answer.read())


def json_request(url: str, key: str, body: Mapping[str, object]) -> urllib.request.Request:
    """Return a request of the client that has this key."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return urllib.request.Request(url, json.dumps(body).encode(), headers)
