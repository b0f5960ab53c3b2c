"""What an endpoint that answered 404 lacks: the model, or the path.

Invariant: asking changes nothing, ends within seconds, and raises nothing.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import anyio
from openai import AsyncOpenAI, NotFoundError, OpenAIError

from agentrl.foreign import one_line

_ASK_S = 5.0
"""Seconds that the endpoint has to list its models."""
_MAX_NAMES = 20


async def describe_missing(endpoint: AsyncOpenAI, model: str) -> str:
    """Return what is perhaps wrong about a chat call that was answered with 404, and the fix.

    Args:
        endpoint: the connection.
        model: the name that the call gave.

    Cancellation: passes through.
    """
    url = str(endpoint.base_url).rstrip("/")
    names: list[str] | None = None
    no_list = f"{url}/models gives no list of models"
    try:
        with anyio.move_on_after(_ASK_S):
            listed = await endpoint.with_options(max_retries=0).models.list()
            names = [one_line(str(each.id)) for each in listed.data]
    except NotFoundError:
        no_list = f"there is no {url}/models either"
    except (OpenAIError, AttributeError, TypeError, ValueError):  # no list, or a list in another shape
        names = None
    if names is None:
        if urlsplit(url).path.endswith("/chat/completions"):
            return f"the base URL must end before /chat/completions: try {url.removesuffix('/chat/completions')}"
        if not urlsplit(url).path.endswith("/v1"):
            return f"{no_list}; most servers have the OpenAI API under /v1: try {url}/v1"
        why = "this is perhaps no server with the OpenAI API, or its API has another path"
        return f"{no_list}: {why}"
    if model not in names:
        offered = ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        return f"the endpoint has no model {model!r}; it offers {offered or 'none'}: name one of them"
    return f"the endpoint has the model {model!r}, but no {url}/chat/completions: it perhaps serves no chat for this model"
