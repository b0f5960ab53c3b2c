"""Which of SGLang's three dialects a server speaks, read from the version in its `/server_info`.

Invariant: what a server cannot do is known before the first call, so nothing is sent that it would silently ignore.

- A, before 0.5.6: a pause always aborts; `/continue_generation` takes no body; updates take no `flush_cache`.
- B, 0.5.6 to 0.5.20: pause modes; version spans per token from 0.5.20 on; weights from a process group, tensor by tensor.
- C, from 0.5.21: `/model_info` and `/server_info` replace the `get_` forms; weights from a process group only between
  `/begin_weight_update` and `/end_weight_update`, each bucket in one piece.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import ReplyError

OUR_ENGINES = frozenset({"embedded", "scripted"})
"""Values of `engine` in `/server_info` by which agentrl's own servers tell themselves from SGLang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What one server understands."""

    name: Literal["A", "B", "C"]
    version: str
    """As the server reports it."""
    engine: str
    """`sglang`, `embedded` or `scripted`."""
    pause_modes: bool
    """Pause keeps requests (`retract`, `in_place`); without it, requests in flight are aborted and sent again."""
    spans: bool
    """Replies say which weight version sampled each token."""

    @property
    def groups(self) -> bool:
        """Whether weights may come from a process group."""
        return self.name != "A"

    @property
    def sessions(self) -> bool:
        """Whether they are refused outside of a begin/end session."""
        return self.name == "C"

    @property
    def flat_buckets(self) -> bool:
        """Whether a bucket comes as one broadcast; some releases of dialect B would, but which ones is not told."""
        return self.name == "C"

    @property
    def exact_checksums(self) -> bool:
        """Whether `/weights_checker` reports `tensor_checksum` digests under HF names."""
        return self.engine in OUR_ENGINES


def dialect_of(version: str, engine: str | None, url: str) -> Dialect:
    """Return the dialect of a server.

    Args:
        version: `version` of `/server_info`.
        engine: `engine` of `/server_info`; real SGLang has none.
        url: names the server in the message.

    Raises:
        ReplyError: when the version cannot be read.

    Example:
        >>> dialect = dialect_of("0.5.23", None, "http://127.0.0.1:30000")
        >>> dialect.name, dialect.spans, dialect.exact_checksums
        ('C', True, False)
        >>> dialect_of("0.5.19.post1", None, "http://127.0.0.1:30000").spans
        False
    """
    if engine in OUR_ENGINES:
        return Dialect(name="C", version=version, engine=engine or "", pause_modes=True, spans=True)
    match = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    if match is None:
        raise ReplyError(
            f"{url}: /server_info reports version {version!r}; expected an SGLang version such as '0.5.23'", url=url
        )
    number = (int(match[1]), int(match[2]), int(match[3]))
    name: Literal["A", "B", "C"] = "A" if number < (0, 5, 6) else "B" if number < (0, 5, 21) else "C"
    return Dialect(name=name, version=version, engine="sglang", pause_modes=name != "A", spans=number >= (0, 5, 20))
