"""The messages of SGLang's control endpoints, with declared types.

Invariant: a message that lacks what is read of it, or has it with another type, becomes a `ReplyError` naming the field.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from agentrl.errors import ReplyError
from agentrl.inference.base import CONTEXT_HEADROOM, CONTEXT_RESERVE

_T = TypeVar("_T")
_UNTRAINED = "default"
"""What SGLang calls the weights it was started with."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What is read of `/server_info`."""

    version: str
    engine: str | None = None
    incremental_streaming_output: bool = False
    """Streamed ids are the new ones only; by default they are all so far."""
    device: str | None = None
    tp_size: int = 1
    """Ranks that each hold a part of every layer."""
    pp_size: int = 1
    dp_size: int = 1
    max_req_input_len: int | None = None
    """Longest prompt, tokens, as context and cache memory allow."""

    @property
    def max_context_tokens(self) -> int | None:
        """Longest context plus output that a call is sure to get; None from servers that do not tell."""
        longest = self.max_req_input_len
        return None if longest is None else longest + CONTEXT_RESERVE - CONTEXT_HEADROOM


class ModelInfo(msgspec.Struct, frozen=True):
    """What is read of `/model_info`."""

    model_path: str = ""
    weight_version: str | int | None = None


class Load(msgspec.Struct, frozen=True):
    """One entry of `/v1/loads`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    token_usage: float = 0.0
    gen_throughput: float = 0.0
    cache_hit_rate: float = 0.0


class Loads(msgspec.Struct, frozen=True):
    """The reply of `/v1/loads`."""

    loads: list[Load]


class Outcome(msgspec.Struct, frozen=True):
    """The reply of a control call."""

    success: bool = True
    message: str = ""


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class Checksums(msgspec.Struct):
    """The reply of `/weights_checker`: one entry for each rank of the server."""

    ranks: list[_Rank]


def decode(body: bytes, kind: type[_T], what: str, url: str) -> _T:
    """Return `body` as `kind`.

    Raises:
        ReplyError: naming the field that is missing or of another type; also for no body at all.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        got = f"{error}; it begins with {body[:120].decode(errors='replace')!r}" if body else "expected JSON, got nothing"
        raise ReplyError(f"{url}: {what} breaks the protocol: {got}", url=url) from error


def parse_version(version: str | int | None, url: str) -> int:
    """Return the policy version a server reports; "default", the weights it started with, is 0.

    Raises:
        ReplyError: for anything but a whole number.

    Example:
        >>> parse_version("default", "http://a"), parse_version("12", "http://a")
        (0, 12)
    """
    if version == _UNTRAINED:
        return 0
    try:
        number = int(str(version))
    except ValueError:
        number = -1
    if number < 0:
        raise ReplyError(
            f"{url}: weight version {version!r} is not a policy version (a whole number, or 'default' before the first "
            "update); something else than agentrl updates this server's weights",
            url=url,
        )
    return number
