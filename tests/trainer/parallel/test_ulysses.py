"""Sequences that are cut over ranks give the gradients of whole ones."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.errors import ConfigError
from agentrl.trainer.model import PolicyModel
from agentrl.trainer.parallel.ranks import Ranks
from agentrl.trainer.parallel.shape import MeshShape
from agentrl.trainer.parallel.shard import whole
from agentrl.trainer.parallel.ulysses import SequenceCut, cut_sequences
from tests.support.ranks import on_ranks
from tests.support.tiny import Architecture, tiny_checkpoint

pytestmark = pytest.mark.starts

_IDS = [np.arange(1, 30, dtype=np.int32), np.arange(5, 9, dtype=np.int32), np.arange(40, 58, dtype=np.int32)]

_TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def gradients(ranks: Ranks, path: Path, checkpointing: bool) -> dict[str, NDArray[np.float32]]:
    """Return the gradient of a weighted sum of log-probs, taken on slices of eight tokens."""
    device = torch.device("cpu")
    model = PolicyModel(path, device=device, gradient_checkpointing=checkpointing, max_logits=8 * 384, ranks=ranks)
    masks = [np.arange(len(ids)) % 3 != 0 for ids in _IDS]
    masks[2][:] = False
    masks[2][-1] = True  # with four parts, two ranks compute no log-prob of this sequence
    values = model.logprobs(model.microbatch(_IDS, masks))
    weights = torch.linspace(-1, 1, len(values))
    ((values * weights).sum() * ranks.averaged).backward()
    return {name: whole(p.grad).numpy().copy() for name, p in model.parameters.items() if p.grad is not None}


@pytest.mark.parametrize(
    ("mesh", "arch"),
    [
        (MeshShape(cp=2), "qwen3"),
        pytest.param(MeshShape(cp=2), "qwen2", marks=pytest.mark.long),
        pytest.param(MeshShape(cp=4), "llama", marks=pytest.mark.long),  # more parts than heads of keys and values
        pytest.param(MeshShape(replicate=2, cp=2), "qwen3", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_gradient_is_that_of_whole_sequences(
    tmp_path: Path, mesh: MeshShape, arch: Architecture, checkpointing: bool
) -> None:
    path = tiny_checkpoint(tmp_path / "model", arch=arch)
    alone = gradients(Ranks(), path, False)
    # FSDP averages over all ranks, and each data rank computes the same samples here: the mean is the gradient of one.
    factor = mesh.data_world

    found = on_ranks(mesh, gradients, path, checkpointing)[0]

    assert found.keys() == alone.keys()
    for name, values in alone.items():
        size = np.linalg.norm(values)
        assert np.linalg.norm(found[name] / factor - values) <= 2e-6 * size, name
        assert size > 0


@contextmanager
def group_of_one(folder: Path) -> Generator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_layers_that_attend_within_a_window_are_refused(tmp_path: Path) -> None:
    windows = AutoConfig.for_model(
        "qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2, **_TINY
    )
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(windows)
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", num_hidden_layers=1, **_TINY))
    with group_of_one(tmp_path) as group:
        with pytest.raises(ConfigError, match=r"trainer\.parallel\.cp: Qwen2ForCausalLM has layers .* within a window"):
            cut_sequences(module, group)
        assert cut_sequences(plain, group).parts == 1


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20), st.data())
def test_each_wanted_token_is_in_one_part_at_its_place(parts: int, rows: int, longest: int, data: st.DataObject) -> None:
    cuts = [SequenceCut(group=dist.GroupMember.NON_GROUP_MEMBER, part=part, parts=parts) for part in range(parts)]  # pyright: ignore[reportArgumentType] - no part speaks to the others
    length = cuts[0].padded(longest)
    assert 0 <= length - longest < parts
    ids = torch.arange(rows * length).reshape(rows, length)
    places = st.lists(st.integers(0, rows * length - 1), unique=True)
    positions = torch.tensor(sorted(data.draw(places)), dtype=torch.long)
    seen: list[int] = []
    for cut in cuts:
        own_ids, columns = cut.own_tokens(ids)
        assert torch.equal(own_ids % length, columns.expand_as(own_ids))
        own, local = cut.own_wanted(positions, length)
        assert torch.equal(own_ids.reshape(-1)[local], positions[own])
        seen += own.tolist()
    assert sorted(seen) == list(range(len(positions)))
