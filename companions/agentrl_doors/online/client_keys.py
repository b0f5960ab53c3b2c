"""The API keys of the clients of an online run, and what each of them may do.

Invariant: the disk holds hashes of keys alone; no key is in a message or a log. Keys are compared by their hashes.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError
from agentrl.support.concurrency import loop_time
from agentrl_doors.gateway.refusals import CallRefused

_LOG: Final = logging.getLogger("agentrl_doors.online")
_KEY_BYTES: Final = 32
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}(/(calls|feedback))?")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_MINUTE_S: Final = 60.0
_SHAPE: Final = "expected lines of a name and the SHA-256 of a key; `agentrl online FILE --new-key NAME` writes one"


class ClientKey:
    """One key of a client: the routes that it opens, its limits, and its use of them.

    Args:
        name: of the client, and `/calls` or `/feedback` behind it for a key that opens only that.
        requests_per_minute: see `KeyRing`.
        max_calls: see `KeyRing`.
    """

    def __init__(self, name: str, *, requests_per_minute: int, max_calls: int) -> None:
        self.key_name = name
        self.name, _, self._opens = name.partition("/")
        self._per_minute, self._max_calls = requests_per_minute, max_calls
        self._recent: deque[float] = deque()
        self._running = 0

    def check_route(self, route: str) -> None:
        """Raise `CallRefused` (403) where the key does not open a route: `feedback`, or one of the model."""
        opens = "feedback" if route == "feedback" else "calls"
        if self._opens not in ("", opens):
            raise CallRefused(
                f"this key opens {self._opens} alone; use the key {self.name}/{opens}",
                status=403,
                code="permission_denied",
            )

    def count_request(self) -> None:
        """Count a request.

        Raises:
            CallRefused: there were too many in the last minute (429, with the seconds until the next one may come).
        """
        now = loop_time()
        while self._recent and self._recent[0] <= now - _MINUTE_S:
            self._recent.popleft()
        if len(self._recent) >= self._per_minute:
            wait_s = math.ceil(self._recent[0] + _MINUTE_S - now)
            raise CallRefused(
                f"this key made {self._per_minute} requests within a minute, its limit; call again in {wait_s} s",
                status=429,
                code="rate_limit_exceeded",
                retry_after_s=max(1, wait_s),
            )
        self._recent.append(now)

    @contextmanager
    def running_call(self) -> Generator[None]:
        """Count a model call while the block runs.

        Raises:
            CallRefused: too many run already (429).
        """
        if self._running >= self._max_calls:
            raise CallRefused(
                f"{self._running} calls of this key run, its limit; call again when one has ended",
                status=429,
                code="rate_limit_exceeded",
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


class KeyRing:
    """The keys of the clients.

    Args:
        hashes: the SHA-256 of each key, in hexadecimal digits, and the name of its client.
        requests_per_minute: of each key; further ones are refused.
        max_calls: model calls of each key that run at the same time.
        file: where keys come and go while the run serves; `read` returns all hashes again when it changes.
        read: see `file`. A file that cannot be read leaves the keys as they were.

    Example:
        >>> ring = KeyRing([("web", hash_key("secret"))], requests_per_minute=60, max_calls=8)
        >>> ring.accepts("secret"), ring.accepts("Secret"), ring.client("secret").name
        (True, False, 'web')
    """

    def __init__(
        self,
        hashes: Iterable[tuple[str, str]],
        *,
        requests_per_minute: int,
        max_calls: int,
        file: Path | None = None,
        read: Callable[[], Iterable[tuple[str, str]]] | None = None,
    ) -> None:
        self._limits = (requests_per_minute, max_calls)
        self._file, self._read, self._stamp = file, read, _stamp_of(file)
        self._clients: dict[str, ClientKey] = {}
        self._replace(hashes)
        if not self._clients:
            raise ConfigError("an online run needs the key of at least one client: pass --keys FILE or --keys-env NAME")

    def _replace(self, hashes: Iterable[tuple[str, str]]) -> None:
        """Take these keys; one that stays keeps its counts."""
        before, (per_minute, max_calls) = self._clients, self._limits
        self._clients = {}
        for name, digest in hashes:
            kept = before.get(digest)
            is_same = kept is not None and kept.key_name == name
            self._clients[digest] = (
                kept if is_same and kept else ClientKey(name, requests_per_minute=per_minute, max_calls=max_calls)
            )

    def _refresh(self) -> None:
        stamp = _stamp_of(self._file)
        if self._read is None or stamp is None or stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._replace(self._read())
        except ConfigError as error:
            _LOG.warning("the keys stay as they were: %s", error)

    def accepts(self, key: str) -> bool:
        """Return whether a client has this key."""
        return self._find(key) is not None

    def client(self, key: str) -> ClientKey:
        """Return the client that has this key; the guard of the server has let it pass."""
        found = self._find(key)
        if found is None:
            raise CallRefused("no client has this key", status=401, code="invalid_api_key")
        return found

    def _find(self, key: str) -> ClientKey | None:
        self._refresh()
        return self._clients.get(hash_key(key))


def _stamp_of(file: Path | None) -> tuple[int, int, int] | None:
    """Return the time, size and inode of a file, which change with its contents; None where they cannot be read."""
    try:
        found = None if file is None else file.stat()
    except OSError:
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def hash_key(key: str) -> str:
    """Return the hash of a key, which is all that the disk holds of it."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_key_hashes(file: Path | None, variable: str | None) -> list[tuple[str, str]]:
    """Return the names and hashes of the keys of a file, and of `NAME:KEY` words of an environment variable."""
    found: dict[str, str] = {}
    if file is not None:
        for name, digest in _read_lines_of_keys(file):
            _add_name(found, name, digest, str(file))
    if variable is not None:
        given = os.environ.get(variable)
        if not given:
            raise ConfigError(f"--keys-env {variable}: this environment variable is not set; export it, or drop the flag")
        for number, word in enumerate(given.split(), 1):
            name, colon, key = word.partition(":")
            if not (colon and key) or _NAME.fullmatch(name) is None:
                raise ConfigError(f"--keys-env {variable}: word {number} is not NAME:KEY; separate words by spaces")
            _add_name(found, name, hash_key(key), variable)
    return list(found.items())


def add_key(file: Path, name: str) -> str:
    """Return a new key whose hash is in the file from now on; the key itself is nowhere else."""
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"--new-key: expected a name of letters, digits, '.', '_' and '-', perhaps with /calls or "
            f"/feedback behind it, got {name!r:.80}"
        )
    known = dict(_read_lines_of_keys(file)) if file.exists() else {}
    key = secrets.token_urlsafe(_KEY_BYTES)
    _add_name(known, name, hash_key(key), str(file))
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as lines:
            lines.write(f"{name} {known[name]}\n")
    except OSError as error:
        raise ConfigError(f"--keys: cannot write {file}: {error.strerror}") from error
    return key


def _read_lines_of_keys(file: Path) -> list[tuple[str, str]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--keys: cannot read {file}: {error}") from error
    found: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or _NAME.fullmatch(words[0]) is None or _HASH.fullmatch(words[1]) is None:
            raise ConfigError(f"{file}, line {number}: {_SHAPE}")  # not the line itself, which may be a key
        found.append((words[0], words[1]))
    return found


def _add_name(found: dict[str, str], name: str, digest: str, where: str) -> None:
    if name in found:
        raise ConfigError(f"{where}: there is a key of the name {name} already; choose another one, or remove its line")
    found[name] = digest
