"""Random ops of an interpreted graph draw what their rules draw, without compiling anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import lazytpu
from lazytpu.runtime import executables, tiers

aten = torch.ops.aten
Draws = dict[str, Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]]


pytestmark = pytest.mark.usefixtures("interpreting")


# The same to the last bit; complex numbers and sums of attention are not.
SAME: Draws = {
    "rand": lambda x: torch.rand(5, 3, device=x.device),
    "rand, float64": lambda x: torch.rand(5, 3, device=x.device, dtype=torch.float64),
    "rand, bfloat16": lambda x: torch.rand(5, 3, device=x.device, dtype=torch.bfloat16),
    "rand of more than is hashed at once": lambda x: torch.rand(40_001, device=x.device),
    "rand_like, transposed": lambda x: torch.rand_like(x.t()),
    "uniform": lambda x: x.clone().uniform_(-2, 3),
    "uniform, ends that are constants": lambda x: torch.empty(1000, device=x.device).uniform_(-0.1, 0.1),
    "bernoulli of tensors": lambda x: x.bernoulli(),
    "bernoulli of a number": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli, float64": lambda x: x.double().bernoulli(),
    "dropout": lambda x: F.dropout(x + 1, 0.4),
    "dropout of everything": lambda x: F.dropout(x + 1, 1.0),
    "dropout, bfloat16": lambda x: F.dropout(x.bfloat16() + 1, 0.4),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 3, 2, 2) + 1, 0.4),
    "randint": lambda x: torch.randint(7, (30,), device=x.device),
    "randint between": lambda x: torch.randint(-3, 9, (30,), device=x.device, dtype=torch.int32),
    "randint, wide": lambda x: torch.randint(-(2**40), 2**50, (30,), device=x.device),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "random": lambda x: (x.long().random_(), x.clone().random_(), x.int().random_(5), x.int().random_(-5, 5)),
    "random of a byte": lambda x: (x.to(torch.uint8).random_(), x.to(torch.bool).random_()),
    "randperm": lambda x: torch.randperm(50, device=x.device),
    "multinomial": lambda x: torch.multinomial(x + 0.1, 3),
    "multinomial with replacement": lambda x: torch.multinomial(x + 0.1, 20, replacement=True),
    "nothing": lambda x: (torch.rand(0, 3, device=x.device), F.dropout(x[:0])),
    "randn": lambda x: torch.randn(50, device=x.device),
    "randn, float64": lambda x: torch.randn(50, device=x.device, dtype=torch.float64),
    "normal": lambda x: (x.clone().normal_(2, 3), torch.normal(x, x + 1), torch.normal(x, 2.0), torch.normal(1.0, x)),
    "exponential": lambda x: x.clone().exponential_(2.0),
    "many normal numbers": lambda x: torch.randn(40_001, device=x.device),
    "many uniform numbers between": lambda x: torch.empty(40_001, device=x.device).uniform_(-2.1, 3.3),
    "many normal numbers about another mean": lambda x: torch.empty(40_001, device=x.device).normal_(2.1, 3.3),
    "exponential, float64": lambda x: x.double().exponential_(2.1),
}
CLOSE: Draws = {
    "randn, complex64": lambda x: torch.randn(50, device=x.device, dtype=torch.complex64),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3, is_causal=True, dropout_p=0.4),
    "attention, a mask and groups": lambda x: F.scaled_dot_product_attention(
        x.view(1, 2, 2, 3), *[x.view(2, 1, 2, 3)[:1]] * 2, attn_mask=x.view(-1)[:4].view(2, 2), dropout_p=0.4,
        enable_gqa=True,
    ),
}  # fmt: skip


def test_what_is_drawn_is_what_the_program_draws(device: torch.device) -> None:
    x = torch.arange(12.0).view(3, 4).div(12).to(device)

    def draw() -> dict[str, list[torch.Tensor]]:
        torch.manual_seed(3)
        made = {name: torch.utils._pytree.tree_leaves(draw(x)) for name, draw in (SAME | CLOSE).items()}
        lazytpu.mark_step()
        return {name: [t.cpu() for t in leaves] for name, leaves in made.items()}

    first, again = draw(), draw()
    assert [lazytpu.metrics.counter(name) for name in ("interpret", "compile", "compile_op")] == [1, 1, 0]
    for name in SAME:
        for a, b in zip(first[name], again[name], strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), name
    for name in CLOSE:
        for a, b in zip(first[name], again[name], strict=True):
            torch.testing.assert_close(a, b, msg=lambda message, name=name: f"{name}: {message}")


def test_gradients_of_dropped_attention_have_its_mask(device: torch.device) -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(3)
        q, k, v = (torch.arange(24.0).view(1, 2, 3, 4).div(24 + i).to(device).requires_grad_() for i in range(3))
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.4).square().sum().backward()
        lazytpu.mark_step()
        return [x.grad.cpu() for x in (q, k, v) if x.grad is not None]

    first, again = step(), step()
    assert len(first) == 3
    assert lazytpu.metrics.counter("interpret") == 1
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b)


def test_a_rate_that_changes_is_an_input(device: torch.device) -> None:
    x = torch.ones(40, 3).to(device)
    for turn, p in enumerate((0.1, 0.2, 0.3)):
        torch.manual_seed(turn)
        interpreted = F.dropout(x, p).cpu()
        lazytpu.config.compile_after = 1
        torch.manual_seed(turn)
        compiled = F.dropout(x * 1, p).cpu()
        lazytpu.config.compile_after = 2
        tiers.forget()
        executables.forget_executables()
        assert torch.equal(interpreted, compiled), p
