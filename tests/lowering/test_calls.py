"""What is kept apart stays a call in the program, with the same results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

import lazytpu
from lazytpu.lowering.registry import lowering_for
from lazytpu.lowering.support.calls import apart


def test_a_call_that_is_kept_apart_is_in_the_program() -> None:
    def scaled(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * 2

    x = jnp.arange(6.0)
    with lowering_for("cpu"):
        program = jax.jit(lambda x: apart(scaled)(x[1:4]) + apart(scaled)(x[2:5])).lower(x).compile()
    plain = jax.jit(lambda x: scaled(x[1:4]) + scaled(x[2:5])).lower(x).compile()
    assert " call(" in program.as_text() and " call(" not in plain.as_text()
    assert program(x).tolist() == plain(x).tolist()


def test_cells_of_recurrent_layers_are_kept_apart_in_inference(device: torch.device) -> None:
    layer = torch.nn.GRU(3, 4)
    x = torch.randn(5, 2, 3)
    with torch.no_grad():
        expected, moved = layer(x)[0], layer.to(device)(x.to(device))[0]
        text = lazytpu.hlo_text(moved, optimized=True)
    assert " call(" in text
    torch.testing.assert_close(moved.cpu(), expected)
