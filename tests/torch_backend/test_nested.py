"""Nested tensors of the jagged layout give the CPU's results; the strided layout raises and names the switch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lazytpu.errors import UnsupportedOpError
from tests.support.both_devices import check

ROWS = (2, 5, 3)


def batch(device: torch.device | str, width: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows that need a gradient, and a nested tensor of them."""
    torch.manual_seed(seed)
    rows = torch.randn(sum(ROWS), width, device="cpu").to(device).requires_grad_()
    offsets = torch.tensor([0, *ROWS], device=device).cumsum(0)
    return rows, torch.nested.nested_tensor_from_jagged(rows, offsets)


@pytest.mark.filterwarnings("ignore")  # torch's own, of the layout
def test_layers_and_their_gradients() -> None:
    def program(device: torch.device | str) -> list[torch.Tensor]:
        rows, x = batch(device)
        weight = torch.linspace(-1, 1, 12, device=device).reshape(3, 4).requires_grad_()
        y = F.layer_norm(F.linear(x, weight).relu(), (3,))
        padded = y.to_padded_tensor(0.0)
        padded.square().sum().backward()
        return [padded, y.mean(1), rows.grad, weight.grad, *x.unbind()]

    check(program, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_attention_and_its_gradients() -> None:
    def program(device: torch.device | str) -> list[torch.Tensor]:
        rows, x = batch(device)
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        found = F.scaled_dot_product_attention(heads, heads * 2, heads).transpose(1, 2).flatten(-2)
        y = (found + x).values()
        y.square().sum().backward()
        return [y, rows.grad]

    check(program, rtol=1e-4, atol=1e-5)


def test_the_strided_layout_names_the_other(device: torch.device) -> None:
    with pytest.raises(UnsupportedOpError, match=r"layout=torch\.jagged"):
        torch.nested.as_nested_tensor([torch.ones(2, device=device), torch.ones(3, device=device)])


@pytest.mark.filterwarnings("ignore")
def test_causal_attention_which_the_cpu_lacks(device: torch.device) -> None:
    _, x = batch(device)
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
    found = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).unbind()
    for got, rows in zip(found, x.unbind(), strict=True):
        row = rows.detach().cpu().unflatten(-1, (2, 2)).transpose(0, 1)[None]
        want = F.scaled_dot_product_attention(row, row, row, is_causal=True)[0].transpose(0, 1)
        torch.testing.assert_close(got.detach().cpu(), want)
