"""Products of bfloat16 weights that are copied to float32 a piece at a time."""

from __future__ import annotations

import pytest
import torch

from agentrl.servers.embedded import products
from agentrl.servers.embedded.products import Products, WidenedProducts, products_for


def on_a_slow_cpu(monkeypatch: pytest.MonkeyPatch, weight: torch.Tensor, piece: int) -> Products | WidenedProducts:
    """Return products as on a CPU without instructions for bfloat16; `piece` weights are copied at a time."""
    monkeypatch.setattr(products, "multiplies_bfloat16_slowly", lambda: True)
    monkeypatch.setattr(products, "_PIECE", piece)
    return products_for(weight)


@pytest.mark.parametrize("piece", [24, 100, 1 << 19], ids=["less than a row", "some rows", "all rows"])
@pytest.mark.parametrize("rows", [4, 33])
def test_a_product_is_the_float32_sum_rounded_once(piece: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(17, 48).bfloat16(), torch.randn(rows, 48).bfloat16()
    bias, base = torch.randn(17).bfloat16(), torch.randn(rows, 17).bfloat16()
    exact = x.double() @ weight.double().t()
    computed = on_a_slow_cpu(monkeypatch, weight, piece)
    for found, wanted in (
        (computed.linear(x, weight), exact),
        (computed.linear(x, weight, bias), exact + bias.double()),
        (computed.onto(base, x, weight, None), exact + base.double()),
    ):
        assert found.dtype == torch.bfloat16
        # One rounding moves a value by at most 2^-8 of it; the sum itself is good to float32.
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-4)


def test_float32_products_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, base = torch.randn(7, 5), torch.randn(9, 5), torch.randn(9, 7)
    computed = on_a_slow_cpu(monkeypatch, weight, 8)
    assert torch.equal(computed.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.equal(computed.onto(base, x, weight, None), torch.addmm(base, x, weight.t()))
