"""The LoRA adapters of one server: one for each version, loaded before calls name it, unloaded when none needs it.

Invariant: from `serve` on, every request names the adapter of the version, and keeps it to its end. A call keeps it too,
unless it falls more than `max_lag` versions behind: the rest of it is then asked for under the newest. A loaded adapter is
the served one, one that running calls have, or one about to be unloaded; so their number is bounded.

Guards against known ways to mislead: a name stands for one version and its digest, and is never loaded twice; names that an
earlier run left are unloaded first; a refusal is an error, with the server's words. Who waits for whom: a load waits for
the calls of the oldest adapter where the server has room for no other, at most `inference.control_timeout_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import orjson

from agentrl.errors import ConfigError, WeightSyncError
from agentrl.inference.sglang.adapter_uses import AdapterUses, NamedAdapter
from agentrl.inference.sglang.calls import ServerCalls
from agentrl.inference.sglang.transport import Control
from agentrl.inference.sglang.wire import AdapterModels, ModelInfo, ServerInfo, decode, parse_version
from agentrl.support.concurrency import Deadline
from agentrl.weights.types import Publication

_OURS = "agentrl-v"


class AdapterReceiver(Protocol):
    """The adapter calls of a server, as the pool makes them."""

    async def load(self, publication: Publication) -> None:
        """Have the server read a published adapter; calls do not name it yet."""
        ...

    async def checksums(self, publication: Publication) -> Mapping[str, str]:
        """Return the digest of each matrix that the server holds; none where it cannot tell."""
        ...

    async def serve(self, publication: Publication) -> None:
        """Have all calls from now on name it, and unload those that no running call has."""
        ...


class NoReceiver:
    """The `AdapterReceiver` of a server that takes none."""

    async def load(self, publication: Publication) -> None:
        """Refuse."""
        raise WeightSyncError(f"this server takes no LoRA adapters ({publication.path}); set sync.adapter: merged")

    async def checksums(self, publication: Publication) -> Mapping[str, str]:
        """Refuse."""
        raise WeightSyncError(f"this server holds no LoRA adapters ({publication.path})")

    async def serve(self, publication: Publication) -> None:
        """Refuse."""
        raise WeightSyncError(f"this server serves no LoRA adapters ({publication.path})")


def adapter_name(publication: Publication) -> str:
    """Return the name of a published adapter at servers.

    Example:
        >>> adapter_name(Publication(version=7, path="/w", checksum="c0ffee" * 5, tensor_checksums={}, adapter=True))
        'agentrl-v7-c0ffeec0ffee'
    """
    return f"{_OURS}{publication.version}-{publication.checksum[:12]}"


class AdapterCalls:
    """The calls to one server over HTTP; an `AdapterReceiver`."""

    def __init__(
        self, control: Control, info: Callable[[], ServerInfo], calls: ServerCalls, *, max_lag: int | None = None
    ) -> None:
        """Serve adapters; calls end with one that is at most `max_lag` versions behind the newest, None: with any."""
        self._control, self._info, self._calls = control, info, calls
        self._uses = calls.adapters = AdapterUses()
        self._max_lag = max_lag

    async def load(self, publication: Publication) -> None:
        """Load an adapter from its directory, after those that nothing needs are unloaded.

        Raises:
            ConfigError: the server was started without adapters.
            WeightSyncError, ServerError: it refused or was late; it may have the adapter, which no call names.
        """
        info, url = self._info(), self._control.url
        if not info.enable_lora:
            raise ConfigError(
                f"{url}: this server takes no LoRA adapters; start it with --enable-lora and --max-lora-rank, or set "
                "sync.adapter: merged"
            )
        name = adapter_name(publication)
        await self._tidy({name})
        loaded = await self.names()
        if info.max_loaded_loras is not None and len(loaded) >= info.max_loaded_loras:
            oldest = min((each for each in loaded if each in self._uses.names), key=_version_in, default=None)
            if oldest is None:
                raise WeightSyncError(
                    f"{url}: holds {len(loaded)} LoRA adapters and has no room for another ({', '.join(sorted(loaded))}); "
                    "start it with a larger --max-loaded-loras, or unload those of other programs"
                )
            await self._until_unused(oldest)
            await self._tidy({name})
        body = {"lora_name": name, "lora_path": publication.path}
        await self._control.weights("/load_lora_adapter", body, f"load the adapter {name} from {publication.path}")

    async def checksums(self, publication: Publication) -> Mapping[str, str]:
        """Return the digest of each matrix in memory, from one of agentrl's servers; SGLang has no such call."""
        if self._info().checksum_kind != "agentrl":
            return {}
        body = orjson.dumps({"lora_name": adapter_name(publication)})
        reply = await self._control.call("POST", "/adapter_checksums", body, "checksums of its adapter")
        return decode(reply, _AdapterDigests, "/adapter_checksums", self._control.url).checksums

    async def serve(self, publication: Publication) -> None:
        """Name the adapter in every call from now on; running calls keep theirs, or continue with it where it is too old."""
        name, url = adapter_name(publication), self._control.url
        if name not in await self.names():
            raise WeightSyncError(f"{url}: took the adapter {name}, but does not list it")
        base = await self._base_version()
        self._uses.served = NamedAdapter(name=name, version=publication.version, base=base)
        if self._max_lag is not None:
            await self._calls.move_on(publication.version - self._max_lag)
        await self._tidy(set())

    async def names(self) -> frozenset[str]:
        """Return the names of the loaded adapters: `/model_info` of agentrl's servers has them, else `/v1/models`."""
        info = await self._model_info()
        if info.lora_adapters is not None:
            return frozenset(info.lora_adapters)
        body = await self._control.call("GET", "/v1/models", None, "the names of its adapters")
        models = decode(body, AdapterModels, "/v1/models", self._control.url).data
        return frozenset(model.id for model in models if model.parent is not None)

    async def current_version(self, reported: int) -> int:
        """Return the version that calls are computed with, where `reported` is the version of the weights."""
        adapter = self._uses.served
        if adapter is None or reported != adapter.base or adapter.name not in await self.names():
            return reported
        return adapter.version

    async def _tidy(self, unwanted: set[str]) -> None:
        """Unload what an earlier version or run left: all of agentrl's adapters but the served one and those in use."""
        served = self._uses.served
        kept = {served.name} if served is not None else set[str]()
        for name in sorted(await self.names(), key=_version_in):
            if name in unwanted:  # the server came back with it; calls that were moved elsewhere are ending
                await self._until_unused(name)
            if name in unwanted or (name.startswith(_OURS) and name not in kept and name not in self._uses.names):
                await self._control.weights("/unload_lora_adapter", {"lora_name": name}, f"unload the adapter {name}")

    async def _until_unused(self, name: str) -> None:
        message = f"{self._control.url}: agentrl waited for the calls of the adapter {name}, to make room for another"
        with Deadline(self._control.timeout_s, lambda: message, self._control.url):
            await self._uses.until_unused(name)

    async def _base_version(self) -> int:
        return parse_version((await self._model_info()).weight_version, self._control.url)

    async def _model_info(self) -> ModelInfo:
        body = await self._control.call("GET", "/model_info", None, "its version and adapters")
        return decode(body, ModelInfo, "/model_info", self._control.url)


class _AdapterDigests(msgspec.Struct):
    checksums: dict[str, str]


def _version_in(name: str) -> tuple[int, str]:
    """Return a key that sorts agentrl's adapters by version, behind the adapters of other programs."""
    number = name.removeprefix(_OURS).partition("-")[0]
    return (int(number) if name.startswith(_OURS) and number.isdecimal() else -1, name)
