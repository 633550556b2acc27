"""Ops of the user's own: recorded where they have a rule, run on the CPU with a warning where not."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import pallas as pl

import lazytpu
from lazytpu.dispatch.cpu_fallback import FallbackWarning
from lazytpu.lowering import lowers

_names = itertools.count()


@pytest.fixture
def numpy_op():
    """An op with a kernel for the CPU only, and a gradient."""

    @torch.library.custom_op(f"lazytpu_test::sin{next(_names)}", mutates_args=(), device_types="cpu")
    def op(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.from_numpy(np.sin(x.numpy()) * scale)

    @op.register_fake
    def _(x, scale):
        return torch.empty_like(x)

    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() * ctx.scale, None

    def setup(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    op.register_autograd(backward, setup_context=setup)
    return op


def test_without_a_rule_it_falls_back_with_a_warning(numpy_op, device):
    x = torch.linspace(-1, 1, 4)
    lazytpu.metrics.reset()
    with pytest.warns(FallbackWarning, match=r"has no lowering and runs on the CPU, at test_custom_ops.py"):
        ours = numpy_op(x.to(device), 2.0)
    torch.testing.assert_close(ours.cpu(), numpy_op(x, 2.0))
    assert sum(lazytpu.metrics.fallbacks().values()) == 1


def test_the_fallback_can_be_an_error(numpy_op, device, monkeypatch):
    monkeypatch.setattr(lazytpu.config, "fallback", "error")
    with pytest.raises(lazytpu.errors.UnsupportedOpError, match="has no lowering"):
        numpy_op(torch.ones(2).to(device), 2.0)


def test_with_a_rule_it_is_recorded_and_differentiates(numpy_op, device):
    @lowers(numpy_op._opoverload)
    def rule(out, x, scale):
        return jnp.sin(x) * scale

    def run(where):
        x = torch.linspace(-1, 1, 4).to(where).requires_grad_()
        y = numpy_op(x * 1.0, 3.0)
        if where != "cpu":
            assert "lazytpu_test.sin" in lazytpu.ir_text(y)
        y.sum().backward()
        return y.detach().cpu(), x.grad.cpu()

    lazytpu.metrics.reset()
    ours = run(device)
    assert lazytpu.metrics.fallbacks() == {}
    torch.testing.assert_close(ours, run("cpu"))


def test_with_a_rule_it_is_part_of_a_compiled_graph(numpy_op, device):
    lowers(numpy_op._opoverload)(lambda out, x, scale: jnp.sin(x) * scale)
    compiled = torch.compile(
        lambda x: numpy_op(x, 2.0) + 1, backend="lazytpu", fullgraph=True, options={"fullgraph": True}
    )
    x = torch.linspace(-1, 1, 4)
    torch.testing.assert_close(compiled(x.to(device)).cpu(), numpy_op(x, 2.0) + 1)


def test_a_rule_of_the_wrong_type_is_noticed(numpy_op, device):
    lowers(numpy_op._opoverload)(lambda out, x, scale: jnp.sin(x).sum())
    y = numpy_op(torch.ones(3).to(device), 1.0)
    with pytest.raises(lazytpu.errors.LoweringError, match=r"gave f32\[\], torch predicts f32\[3\]"):
        y.cpu()


def test_a_pallas_kernel(device):
    @torch.library.custom_op(f"lazytpu_test::gelu{next(_names)}", mutates_args=(), device_types="cpu")
    def squared(x: torch.Tensor) -> torch.Tensor:
        return x * x + 1

    squared.register_fake(lambda x: torch.empty_like(x))

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * x_ref[...] + 1

    @lowers(squared._opoverload)
    def rule(out, x):
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
            interpret=lazytpu.lowering.target_platform() == "cpu",
        )
        return call(x)

    x = torch.arange(8.0).reshape(2, 4)
    torch.testing.assert_close(squared(x.to(device)).cpu(), x * x + 1)


def test_one_written_in_torch_ops_is_recorded_op_by_op(device):
    @torch.library.custom_op(f"lazytpu_test::mix{next(_names)}", mutates_args=())
    def mix(x: torch.Tensor) -> torch.Tensor:
        return x.exp() + 1

    text = lazytpu.ir_text(mix(torch.ones(3).to(device)))
    assert "aten.exp" in text
    assert "aten.add" in text


def test_one_that_writes_falls_back_and_takes_no_rule(device):
    @torch.library.custom_op(f"lazytpu_test::inc{next(_names)}", mutates_args=("x",), device_types="cpu")
    def increment(x: torch.Tensor) -> None:
        x.add_(1)

    x = torch.ones(2).to(device)
    with pytest.warns(FallbackWarning):
        increment(x)
    torch.testing.assert_close(x.cpu(), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="writes to its arguments"):
        lowers(increment._opoverload)(lambda out, x: x + 1)


def test_a_second_rule_is_refused(numpy_op):
    lowers(numpy_op._opoverload)(lambda out, x, scale: x)
    with pytest.raises(ValueError, match="two lowering rules"):
        lowers(numpy_op._opoverload)(lambda out, x, scale: x)
