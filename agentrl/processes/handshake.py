"""The handshake of a driver with a trainer rank or rollout worker over TCP.

A rollout worker is the only rank of its meeting. The driver sends a `Challenge`, the rank a signed `Hello`, and, once all
ranks are there, the driver a signed `Welcome`, or a `Refused`. Each is msgpack after a length of 4 bytes, little-endian.

Invariant: a frame has at most `MAX_BYTES`, decodes into one declared type or is refused, and can run nothing. A signature
is an HMAC-SHA256 under the token over the other side's fresh nonce: the token itself never travels, and a recorded
handshake opens nothing.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import Annotated, Literal, TypeVar

import msgspec

from agentrl.errors import ConfigError, InvariantError
from agentrl.processes.frames import decoded

HEADER_BYTES = 4
MAX_BYTES = 4096
"""Largest body of a frame of the handshake."""
NONCE_BYTES = 32
MIN_TOKEN = 16
"""Shortest token, in characters."""
KEEPALIVE_S = 15
"""Seconds after which a connection whose other machine does not answer is closed."""

Signer = Literal["driver", "rank"]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Text = Annotated[str, msgspec.Meta(max_length=1000)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Pid = Annotated[int, msgspec.Meta(ge=0, le=2**22)]


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Asks who has connected."""

    nonce: _Nonce


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The identity of a rank."""

    nonce: _Nonce
    rank: _Rank
    world: _Rank
    machine: _Text
    """Name of its machine, for messages."""
    pid: _Pid
    address: _Text
    """Its address on the connection to the driver; on rank 0 the ranks meet there."""
    store_port: _Port
    """Port of rank 0's TCPStore; 0 on the other ranks."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All ranks are there, and find each other at the TCPStore of rank 0."""

    store_host: _Text
    store_port: _Port


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The reason why a rank cannot join."""

    message: _Text
    final: bool
    """Whether trying again is of no use."""


class Signed(msgspec.Struct, frozen=True, tag=True):
    """A message and its signature."""

    body: bytes
    proof: bytes


Handshake = TypeVar("Handshake", bound=msgspec.Struct)


def new_nonce() -> bytes:
    """Return fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def new_token() -> str:
    """Return a random token, for a meeting whose ranks the driver starts itself."""
    return secrets.token_urlsafe(32)


def checked_token(token: str | None, variable: str) -> str:
    """Return the token; raises ConfigError where the variable is not set, or the token is short."""
    if not token:
        raise ConfigError(
            f"{variable} is not set: give the driver and every trainer rank the same secret, such as $(openssl rand -hex 32)"
        )
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{variable} has {len(token)} characters, expected at least {MIN_TOKEN}, such as $(openssl rand -hex 32)"
        )
    return token


def encode_greeting(message: msgspec.Struct) -> bytes:
    """Return `message` as a frame."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def length_of(header: bytes) -> int:
    """Return the length of the body after `header`; raises InvariantError when it is over the limit."""
    length = int.from_bytes(header, "little")
    if length > MAX_BYTES:
        raise InvariantError(f"a frame of {length} bytes, expected at most {MAX_BYTES}")
    return length


def decode_greeting(body: bytes, expected: type[Handshake]) -> Handshake:
    """Return the message in `body`; raises InvariantError when it is not of the type expected."""
    return decoded(msgspec.msgpack.Decoder(expected), body, f"a {expected.__name__}")


def sign(message: msgspec.Struct, token: str, signer: Signer, nonce: bytes) -> Signed:
    """Return `message` with a signature over the other side's `nonce`."""
    body = msgspec.msgpack.encode(message)
    return Signed(body, _proof(token, signer, nonce, body))


def verified(signed: Signed, expected: type[Handshake], token: str, signer: Signer, nonce: bytes) -> Handshake | None:
    """Return the message of `signed`; None: the signature is wrong. The comparison takes the same time for all.

    Raises:
        InvariantError: the signature is right, but the message is not of the type expected.
    """
    if not hmac.compare_digest(signed.proof, _proof(token, signer, nonce, signed.body)):
        return None
    return decode_greeting(signed.body, expected)


def _proof(token: str, signer: Signer, nonce: bytes, body: bytes) -> bytes:
    return hmac.digest(token.encode(), f"agentrl {signer}\n".encode() + nonce + body, "sha256")


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel close `connection` once the other machine has not answered for `KEEPALIVE_S`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", KEEPALIVE_S * 1000),
    ):
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
