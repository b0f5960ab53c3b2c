"""The calls by which a server takes weights from a process group: join, begin, one call for each bucket, end, leave.

Invariant: a call answers once the engine has done what it says (HTTP 200) or refused it (400); other calls are answered
meanwhile. Who waits for whom: joining waits for the other ranks, and a bucket for rank 0 to send it, as long as the engine
says; both end when rank 0 is gone.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from agentrl.errors import RequestRejected
from agentrl.inference.engine import ControlReply, WeightGroups
from agentrl.inference.http_errors import decode_body, json_reply
from agentrl.transfer import WIRE_DTYPES, Bucket, GroupAddress, TensorSpec

_GROUP = "weight_update_group"
_FLAT = "flattened_bucket"


class _Join(msgspec.Struct):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = _GROUP
    backend: str = "nccl"


class _Leave(msgspec.Struct):
    group_name: str = _GROUP


class _Nothing(msgspec.Struct):
    selector: Literal["target", "draft", "all"] = "all"


class _Receive(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = _GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class GroupRoutes:
    """One method per endpoint."""

    def __init__(self, groups: WeightGroups) -> None:
        """Control `groups`."""
        self._groups = groups

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        post = app.router.add_post
        post("/init_weights_update_group", self.join)
        post("/destroy_weights_update_group", self.leave)
        post("/begin_weight_update", self.begin)
        post("/update_weights_from_distributed", self.receive)
        post("/end_weight_update", self.end)

    async def join(self, request: web.Request) -> web.Response:
        """Join a group; answers when it is complete."""
        sent = decode_body(await request.read(), _Join)
        if sent.backend != "gloo":
            return _answer(ControlReply(success=False, message=f"this server speaks gloo, not {sent.backend}"))
        if not 0 < sent.rank_offset < sent.world_size or not sent.group_name:
            why = f"rank {sent.rank_offset} of {sent.world_size} in {sent.group_name!r}: expected a name and a rank above 0"
            return _answer(ControlReply(success=False, message=why))
        address = GroupAddress(sent.group_name, sent.master_address, sent.master_port, sent.world_size, "gloo")
        return _answer(await self._groups.join(address, sent.rank_offset))

    async def leave(self, request: web.Request) -> web.Response:
        """Forget a group."""
        return _answer(await self._groups.leave(decode_body(await request.read(), _Leave).group_name))

    async def begin(self, request: web.Request) -> web.Response:
        """Open a session."""
        decode_body(await request.read(), _Nothing)
        return _answer(await self._groups.begin())

    async def receive(self, request: web.Request) -> web.Response:
        """Take a bucket; answers when it is there, and served if it carries a version."""
        sent = decode_body(await request.read(), _Receive)
        done = await self._groups.receive(
            _bucket(sent),
            sent.group_name,
            flat=sent.load_format == _FLAT,
            weight_version=sent.weight_version,
            flush_cache=sent.flush_cache,
            abort_all_requests=sent.abort_all_requests,
        )
        if done.success and sent.weight_version is not None:
            message = f"{done.message} Weight version updated to {sent.weight_version}."
            done = ControlReply(success=True, message=message)
        return _answer(done)

    async def end(self, request: web.Request) -> web.Response:
        """Close the session."""
        decode_body(await request.read(), _Nothing)
        return _answer(await self._groups.end())


def _bucket(sent: _Receive) -> Bucket:
    if not len(sent.names) == len(sent.dtypes) == len(sent.shapes) or not sent.names:
        counts = f"{len(sent.names)} names, {len(sent.dtypes)} dtypes, {len(sent.shapes)} shapes"
        raise RequestRejected(f"expected as many names as dtypes and shapes, at least one; got {counts}", status=400)
    if sent.load_format not in (None, _FLAT):
        raise RequestRejected(f"load_format must be {_FLAT} or left out, got {sent.load_format!r}", status=400)
    specs = tuple(TensorSpec(*spec) for spec in zip(sent.names, sent.dtypes, map(tuple, sent.shapes), strict=True))
    for spec in specs:
        if spec.dtype not in WIRE_DTYPES or min(spec.shape, default=0) < 0:
            raise RequestRejected(f"{spec.name}: cannot take {spec.dtype} {list(spec.shape)}", status=400)
    return specs


def _answer(done: ControlReply) -> web.Response:
    return json_reply({"success": done.success, "message": done.message}, status=200 if done.success else 400)
