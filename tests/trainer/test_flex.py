"""One kernel for a tree attends as products run by run do, and skips the blocks that see nothing of each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from agentrl.algo.prefixes import TokenTree, token_tree
from agentrl.trainer.flex import BLOCK, tree_attention, tree_mask
from agentrl.trainer.shared import shared_attention, shared_row
from agentrl.types import Int32Array

_CPU = torch.device("cpu")
# Not compiled, as on a CPU, FlexAttention says that it makes all products.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def forked(seed: int) -> TokenTree:
    """Return a tree of sequences that fork from earlier ones at any token."""
    random = np.random.default_rng(seed)
    grown: list[Int32Array] = [random.integers(0, 9, 300).astype(np.int32)]
    for _ in range(6):
        stem = grown[random.integers(len(grown))]
        tail = random.integers(0, 9, random.integers(1, 200)).astype(np.int32)
        grown.append(np.concatenate([stem[: random.integers(1, len(stem))], tail]))
    return token_tree(grown)


def seen(tree: TokenTree) -> torch.Tensor:
    """Return [N, N]: whether a token is at or before another one in a sequence."""
    found = np.zeros((len(tree.token_ids),) * 2, bool)
    for where in tree.places:
        found[np.ix_(where, where)] |= np.tri(len(where), dtype=bool)
    return torch.from_numpy(found)


@pytest.mark.parametrize("seed", range(5))
def test_one_kernel_attends_to_what_sequences_hold(seed: int) -> None:
    tree = forked(seed)
    torch.manual_seed(seed)
    size = len(tree.token_ids)
    query, key, value = torch.randn(1, 4, size, 16), torch.randn(1, 2, size, 16), torch.randn(1, 2, size, 16)
    mask = tree_mask(tree.ends, _CPU)
    assert mask is not None
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen(tree), enable_gqa=True)
    torch.testing.assert_close(tree_attention(query, key, value, mask, None), expected)
    by_kernel, by_run = (
        shared_attention(torch.nn.Identity(), query, key, value, None, shared_row=shared_row(tree, _CPU, one_kernel=one))[0]
        for one in (True, False)
    )
    torch.testing.assert_close(by_kernel, by_run)


@pytest.mark.parametrize("seed", range(5))
def test_the_blocks_of_a_mask_are_those_in_which_a_token_sees_another(seed: int) -> None:
    tree = forked(seed)
    mask = tree_mask(tree.ends, _CPU)
    assert mask is not None
    blocks = -(-len(tree.token_ids) // BLOCK)
    padded = functional.pad(seen(tree), (0, blocks * BLOCK - len(tree.token_ids)) * 2)
    squares = padded.reshape(blocks, BLOCK, blocks, BLOCK)
    torch.testing.assert_close(mask.to_dense()[0, 0].bool(), squares.any(3).any(1))


def test_a_row_shorter_than_a_block_is_computed_run_by_run() -> None:
    row = shared_row(token_tree([np.arange(9, dtype=np.int32), np.arange(4, dtype=np.int32)]), _CPU, one_kernel=True)
    assert row.mask is None
