"""The trainer as rank 0: what arrives, in which order, and what becomes of servers that do not take it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch import Tensor

from agentrl.errors import ConfigError, InvariantError
from agentrl.weights.config import SyncConfig
from agentrl.weights.sender import WeightSender, plan_sending
from agentrl.weights.tensors import RawTensor
from agentrl.weights.types import GroupAddress, GroupRequest, Manifest
from tests.weights.receivers import PATIENCE, Receiver

MakeSender = Callable[..., WeightSender]

# A peer as torch's own helper makes it, with the store prefixed by the group's name first, as SGLang does.
PEER = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
port, name, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # a server has a default group of its own
store, rank, size = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timedelta(seconds=60)))
group, _ = c10d._new_process_group_helper(
    size, rank, [], c10d.Backend("gloo"), c10d.PrefixStore(name, store), group_name=name, timeout=timedelta(seconds=60)
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
weights = torch.empty(count)
dist.broadcast(weights, src=0, group=group)
print(weights.sum().item())
"""


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (600, 700), "norm": (7,), "scale": (), "nothing": (0, 4), "head": (800, 700)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def sender() -> Iterator[MakeSender]:
    """Makes senders; whatever became of their groups, no thread of theirs outlives the test."""
    made: list[WeightSender] = []
    before = threading.enumerate()

    def make(**changes: object) -> WeightSender:
        config = SyncConfig.model_validate({"bucket_mb": 1, "timeout_s": 300, **changes})
        made.append(WeightSender(config, torch.device("cpu")))
        return made[-1]

    yield make
    for source in made:
        source.close()
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith("sender "):
            thread.join(200)  # less than the timeout of a group, more than torch's naming of the address in its error takes
            assert not thread.is_alive()


def opened(source: WeightSender, count: int = 1, *, flat: bool = True) -> list[GroupAddress]:
    return source.open([GroupRequest(f"g{n}", ranks=1, nccl=False, flat=flat) for n in range(count)], ())


def begun(source: WeightSender, groups: list[str], *, seed: int = 0, dtype: str = "float32") -> Manifest:
    manifest = plan_sending(1, weights(seed), dtype=dtype, bucket_mb=1)
    source.begin(manifest, weights(seed), groups)
    return manifest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("flat", [True, False])
def test_every_tensor_arrives_bit_for_bit_in_the_type_asked_for(dtype: str, flat: bool, sender: MakeSender) -> None:
    source = sender()
    [address] = opened(source, flat=flat)
    receiver = Receiver(address, flat=flat).joined()
    manifest = begun(source, ["g0"], dtype=dtype)
    assert len(manifest.buckets) > 1
    receiver.take(manifest)
    source.start(["g0"])
    assert source.finish(["g0"]) == {}
    receiver.wait()
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in weights().items()}
    assert receiver.tensors.keys() == expected.keys()
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in expected.items())
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    for name, tensor in expected.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        raw = RawTensor(dtype=names[dtype], shape=tuple(tensor.shape), data=data)
        assert manifest.tensor_checksums[name] == raw.checksum(name)


def test_nothing_is_sent_before_it_is_started_and_versions_follow_one_another(sender: MakeSender) -> None:
    source = sender()
    [address] = opened(source)
    receiver = Receiver(address).joined()
    for seed in (1, 2, 3):
        manifest = begun(source, ["g0"], seed=seed)
        assert source.sending
        receiver.take(manifest)
        assert receiver.waits
        source.start(["g0"])
        source.finish(["g0"])
        assert not source.sending
        receiver.wait()
        assert torch.equal(receiver.tensors["head"], weights(seed)["head"])


class Watched(Mapping[str, Tensor]):
    """Weights that tell which of them have been read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.read = {name: threading.Event() for name in tensors}

    def __getitem__(self, name: str) -> Tensor:
        self.read[name].set()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_the_next_bucket_is_gathered_while_one_is_on_the_wire(sender: MakeSender) -> None:
    source = sender()
    [address] = opened(source)
    receiver = Receiver(address).joined()
    tensors = Watched(weights())
    manifest = plan_sending(1, tensors, dtype="float32", bucket_mb=1)
    source.begin(manifest, tensors, ["g0"])
    first, second = (bucket[-1].name for bucket in manifest.buckets[:2])
    tensors.read[second].clear()  # by what planned the buckets
    source.start(["g0"])
    assert tensors.read[second].wait(PATIENCE.total_seconds())  # and nobody has taken the first
    receiver.take(manifest)
    assert source.finish(["g0"]) == {}
    receiver.wait()
    assert all(torch.equal(receiver.tensors[name], weights()[name]) for name in (first, second))


def test_all_ranks_of_a_server_get_the_same(sender: MakeSender) -> None:
    source = sender()
    [address] = source.open([GroupRequest("tp", ranks=2, nccl=False, flat=True)], ())
    receivers = [Receiver(address, rank=rank) for rank in (1, 2)]
    manifest = begun(source, ["tp"])
    for receiver in receivers:
        receiver.joined().take(manifest)
    source.start(["tp"])
    assert source.finish(["tp"]) == {}
    for receiver in receivers:
        assert torch.equal(receiver.wait().tensors["embedding"], weights()["embedding"])


def test_a_server_that_never_joins_or_never_takes_delays_nobody_else(sender: MakeSender) -> None:
    source = sender()
    addresses = opened(source, 3)
    good, idle = Receiver(addresses[0]).joined(), Receiver(addresses[1]).joined()
    manifest = begun(source, ["g0", "g1", "g2"])
    good.take(manifest)
    source.start(["g0", "g1", "g2"])
    good.wait()
    assert torch.equal(good.tensors["head"], weights()["head"])
    assert source.finish(["g0", "g1", "g2"], ["g1", "g2"]) == {}  # returns at once, though their threads are stuck
    idle.leave()
    good.take(begun(source, ["g0"], seed=5))
    source.start(["g0"])
    assert source.finish(["g0"]) == {}
    assert torch.equal(good.wait().tensors["head"], weights(5)["head"])


def test_who_is_not_abandoned_and_does_not_join_is_a_failure_after_the_timeout(sender: MakeSender) -> None:
    source = sender(timeout_s=1)
    opened(source)
    begun(source, ["g0"])
    source.start(["g0"])
    [failure] = source.finish(["g0"]).values()
    assert "did not join" in failure or "the sending was not done after 1 s (sync.timeout_s)" in failure
    with pytest.raises(InvariantError, match="finish and open first"):
        begun(source, ["g0"])


def test_a_server_that_leaves_in_the_middle_is_a_failure_and_the_others_get_everything(sender: MakeSender) -> None:
    source = sender()
    addresses = opened(source, 2)
    good, leaving = (Receiver(address).joined() for address in addresses)
    manifest = begun(source, ["g0", "g1"])
    good.take(manifest)
    leaving.take(manifest, stop_after=1)
    source.start(["g0", "g1"])
    failures = source.finish(["g0", "g1"])
    assert set(failures) == {"g1"}
    assert "sending to the server failed" in failures["g1"]
    assert torch.equal(good.wait().tensors["head"], weights()["head"])


def test_abandoning_ends_the_wait_of_a_server_that_is_alive(sender: MakeSender) -> None:
    source = sender()
    [address] = opened(source)
    receiver = Receiver(address).joined()
    receiver.take(begun(source, ["g0"]))
    source.finish(["g0"], ["g0"])
    receiver.wait()
    assert receiver.error is not None
    assert receiver.buckets == 0


def test_a_group_is_closed_and_the_others_are_not(sender: MakeSender) -> None:
    source = sender()
    first, second = (Receiver(address).joined() for address in opened(source, 2))
    source.open([], ["g0"])
    manifest = begun(source, ["g1"])
    first.take(manifest)
    second.take(manifest)
    source.start(["g1"])
    assert source.finish(["g1"]) == {}
    assert first.wait().error is not None
    assert second.wait().error is None


def test_two_sendings_at_once_and_unknown_groups_are_refused(sender: MakeSender) -> None:
    source = sender()
    opened(source)
    with pytest.raises(InvariantError, match="finish and open first"):
        begun(source, ["other"])
    begun(source, ["g0"])
    with pytest.raises(InvariantError, match=r"in use \['g0'\]"):
        begun(source, ["g0"])
    source.finish(["g0"], ["g0"])


def test_the_store_listens_on_its_address_only(sender: MakeSender) -> None:
    [address] = opened(sender())
    with socket.create_connection(("127.0.0.1", address.port), timeout=5):
        pass
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", address.port), timeout=5)


def test_groups_that_are_closed_as_soon_as_they_are_open_leave_no_thread_behind(sender: MakeSender) -> None:
    source = sender()
    for _ in range(40):
        opened(source)
        source.open([], ["g0"])  # the fixture looks for their threads


@pytest.mark.parametrize(
    ("changes", "field"), [({"address": "203.0.113.7"}, "sync.address"), ({"backend": "nccl"}, "sync.backend")]
)
def test_what_cannot_be_opened_names_the_field(changes: dict[str, object], field: str, sender: MakeSender) -> None:
    with pytest.raises(ConfigError, match=field):
        opened(sender(**changes))


@pytest.mark.starts
def test_a_group_made_by_torchs_own_helper_is_the_same_group(sender: MakeSender) -> None:
    source = sender()
    [address] = opened(source)
    count = weights()["head"].numel()
    arguments = [sys.executable, "-c", PEER, str(address.port), address.name, str(count)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as peer:
        head = {"head": weights()["head"]}
        source.begin(plan_sending(1, head, dtype="float32", bucket_mb=1), head, ["g0"])
        source.start(["g0"])
        out, _ = peer.communicate(timeout=PATIENCE.total_seconds() + 40)
    assert source.finish(["g0"]) == {}
    assert float(out) == pytest.approx(weights()["head"].sum().item(), abs=1e-2)
