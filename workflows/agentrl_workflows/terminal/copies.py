"""Copies of paths of one container for another one, as an archive that programs of the containers make and unpack."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from typing import Final

import anyio

from agentrl_sandbox.containers import Container
from agentrl_workflows.terminal.benches import limits_as_full_disks

_COPY_S: Final = 60.0


async def archive_of(container: Container, paths: Sequence[str], max_bytes: int) -> bytes | None:
    """Return an archive of those of these paths that are there, which a program of the container makes.

    None: they cannot be copied, or a limit has ended the container, which is the agent's doing. An agent that changes the
    program changes no more than what it could as well write into the files themselves.
    """
    name = f"/tmp/{secrets.token_hex(8)}"
    line = f'cd / && for p in {_quoted_paths(paths)}; do [ -e "$p" ] && echo "$p"; done | tar -cf {name} -T - ; rc=$?'
    try:
        await container.execute(["/bin/sh", "-c", f"{line}; exit $rc"], timeout_s=_COPY_S)
        with limits_as_full_disks(container):
            return await container.download(name, max_bytes=max_bytes)
    except OSError:
        return None
    finally:
        with anyio.move_on_after(_COPY_S, shield=True):
            await container.execute(["/bin/rm", "-f", name], timeout_s=_COPY_S)


async def unpack(container: Container, copy: bytes, paths: Sequence[str], *, keep_missing: bool = False) -> bool:
    """Put the files of an archive in the place of these paths; return whether the container holds an archive so large.

    Args:
        container: that gets them.
        copy: the archive.
        paths: that it was made of.
        keep_missing: leave the container's own files at paths that the archive lacks.
    """
    try:
        with limits_as_full_disks(container):
            await container.upload({"/tmp/copy.tar": copy})
    except OSError:
        return False
    is_replaced = 'printf \'%s\\n\' "$held" | grep -qxF -e "$p" -e "$p/"' if keep_missing else "true"
    held = "held=$(tar -tf /tmp/copy.tar); " if keep_missing else ""
    remove = f'for p in {_quoted_paths(paths)}; do {is_replaced} && rm -rf "$p"; done'
    line = f"cd / && {held}{remove}; tar -xf /tmp/copy.tar"
    await container.execute(["/bin/sh", "-c", line], timeout_s=_COPY_S)
    return True


def _quoted_paths(paths: Sequence[str]) -> str:
    return " ".join(shlex.quote(path.removeprefix("/")) for path in paths)
