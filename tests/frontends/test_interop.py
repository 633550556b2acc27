"""Tensors and functions shared with jax, numpy and torch on the CPU."""

from __future__ import annotations

import functools
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.experimental import pallas as pl
from torch import nn

import lazytpu
from lazytpu.ir.tree import trace
from lazytpu.observe import metrics


def close(a, b, **tolerance):
    torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), **tolerance)


@pytest.fixture(autouse=True)
def counted():
    metrics.reset()


# --- call_jax -----------------------------------------------------------------------------------------------------


def test_a_jax_function_is_one_node_and_runs_later(device):
    x = torch.randn(4, 3).to(device)
    lazytpu.mark_step()
    runs = metrics.counter("execute")
    y = lazytpu.call_jax(lambda a: jnp.tanh(a) * 2, x)
    assert trace.cursor.depth == 1
    assert "lazytpu.call_jax([%p0], '<lambda>#" in lazytpu.ir_text(y)
    assert "test_interop.py" in lazytpu.ir_text(y)
    assert metrics.counter("execute") == runs
    close(y, x.cpu().tanh() * 2)


def test_it_is_traced_once_for_each_set_of_types(device):
    def double(a):
        return a * 2

    x = torch.randn(3).to(device)
    for _ in range(5):
        lazytpu.call_jax(double, x)
        lazytpu.mark_step()
    assert metrics.counter("trace_jax") == 1
    compiled = metrics.counter("compile")
    assert compiled <= 1
    lazytpu.call_jax(double, torch.randn(4).to(device))
    lazytpu.call_jax(double, torch.randn(3, dtype=torch.float64).to(device))
    assert metrics.counter("trace_jax") == 3
    assert metrics.counter("compile") == compiled


def test_equal_functions_are_one_program(device):
    """A lambda made anew is traced anew, but what it computes is the same graph."""
    x = torch.randn(3).to(device)
    lazytpu.mark_step()
    for _ in range(4):
        y = lazytpu.call_jax(lambda a: jnp.sin(a) + 1, x)
        lazytpu.mark_step()
    assert metrics.counter("trace_jax") == 4
    assert metrics.counter("compile") == 1
    close(y, x.cpu().sin() + 1)


Pair = namedtuple("Pair", "left right")


def test_pytrees_in_and_out(device):
    def f(pair, table, *, scale, mode):
        assert mode == "sum"
        return Pair(pair.left * scale, {"n": None, "all": [table["b"] + pair.right, jnp.int32(3)]})

    a, b, c = (torch.randn(2).to(device) for _ in range(3))
    left, right = lazytpu.call_jax(f, Pair(a, b), {"b": c}, scale=2.5, mode="sum")
    close(left, a.cpu() * 2.5)
    close(right["all"][0], b.cpu() + c.cpu())
    assert right["n"] is None
    assert (right["all"][1].dtype, right["all"][1].item()) == (torch.int32, 3)


def test_arrays_of_jax_and_numpy_and_keys_are_operands(device):
    x = torch.ones(3).to(device)
    key = jax.random.key(7)
    out = lazytpu.call_jax(
        lambda a, b, c, k: a + b + c + jax.random.normal(k, (3,)), x, np.ones(3, "f"), jnp.ones(3), key
    )
    close(out, torch.from_numpy(np.array(3 + jax.random.normal(key, (3,)))))


def test_arrays_a_function_closes_over_are_inputs_not_constants(device):
    table = jnp.arange(1000.0)
    x = torch.ones(1000).to(device)
    y = lazytpu.call_jax(lambda a: a * table, x)
    assert lazytpu.ir_text(y).count("f32[1000]") >= 3
    assert "dense<[" not in lazytpu.stablehlo_text(y)
    close(y, torch.arange(1000.0))


def second_order(f, *inputs):
    """Gradients of a function, and of the sum of their squares."""
    first = torch.autograd.grad(sum(r.abs().square().sum() for r in f(*inputs)), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.abs().square().sum() for g in first), inputs)
    return [*first, *second]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_to_second_order(device, dtype):
    def ours(a, b):
        return lazytpu.call_jax(lambda a, b: (jnp.sin(a) * b + a * a, jnp.sum(b * a), jnp.argmax(jnp.abs(a))), a, b)[:2]

    def torchs(a, b):
        return torch.sin(a) * b + a * a, torch.sum(b * a)

    x, y = (torch.randn(3, dtype=dtype).requires_grad_() for _ in range(2))
    got = second_order(ours, *[t.detach().to(device).requires_grad_() for t in (x, y)])
    for a, b in zip(got, second_order(torchs, x, y), strict=True):
        close(a, b)


def test_the_gradient_in_the_middle_of_a_model(device):
    torch.manual_seed(0)
    cpu = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    ours = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    ours.load_state_dict(cpu.state_dict())
    ours.to(device)
    x = torch.randn(5, 4)
    F.silu(cpu[0](x)).pow(1).matmul(cpu[1].weight.T).sum().backward()
    hidden = lazytpu.call_jax(jax.nn.silu, ours[0](x.to(device)))
    hidden.matmul(ours[1].weight.T).sum().backward()
    for p, q in zip(cpu.parameters(), ours.parameters(), strict=True):
        if p.grad is not None:
            close(q.grad, p.grad, rtol=1e-5, atol=1e-6)


def test_only_wanted_gradients_are_computed(device):
    x = torch.randn(3).to(device).requires_grad_()
    y = torch.randn(3).to(device)
    lazytpu.call_jax(lambda a, b: a * b, x, y).sum().backward()
    assert y.grad is None
    close(x.grad, y.cpu())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own use of it
def test_functorch_transforms(device):
    x = torch.randn(4, 3).to(device)

    def f(t):
        return lazytpu.call_jax(lambda a: jnp.sum(jnp.sin(a) * a), t)

    close(torch.func.vmap(f)(x), (x.cpu().sin() * x.cpu()).sum(1))
    close(torch.func.grad(f)(x), x.cpu().cos() * x.cpu() + x.cpu().sin())
    _, tangent = torch.func.jvp(f, (x,), (torch.ones_like(x),))
    close(tangent, (x.cpu().cos() * x.cpu() + x.cpu().sin()).sum())
    hessian = torch.func.hessian(f)(x[0])
    close(hessian, torch.diag(2 * x[0].cpu().cos() - x[0].cpu().sin() * x[0].cpu()), rtol=1e-5, atol=1e-6)


def test_pallas_in_interpret_mode(device):
    def kernel(a_ref, b_ref, out_ref):
        out_ref[...] = a_ref[...] + 2 * b_ref[...]

    @jax.jit
    def add(a, b):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype), interpret=True)(a, b)

    x, y = torch.randn(8, 4).to(device), torch.randn(8, 4).to(device)
    close(lazytpu.call_jax(add, x, y), x.cpu() + 2 * y.cpu())


def test_wide_types_stay_wide(device):
    big = torch.tensor([1 << 40]).to(device)
    assert lazytpu.call_jax(lambda a: a + 1, big).tolist() == [(1 << 40) + 1]
    assert lazytpu.call_jax(lambda a: a + jnp.ones(1), torch.ones(1).to(device)).dtype == torch.float32
    assert not jax.config.jax_enable_x64


def test_mistakes_are_told_and_record_nothing(device):
    x = torch.randn(3).to(device)
    lazytpu.mark_step()
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on tpu, but an argument of .* is on cpu"):
        lazytpu.call_jax(jnp.add, x, torch.ones(3))
    with pytest.raises(TypeError, match="cannot be hashed"):
        lazytpu.call_jax(lambda a, s: a, x, frozenset([1]) and bytearray(b"x"))
    with pytest.raises(TypeError, match="shapes must|incompatible shapes"):
        lazytpu.call_jax(jnp.add, x, torch.ones(4).to(device))
    with pytest.raises(TypeError, match="returns an array of dtype key<fry>.*key_data"):
        lazytpu.call_jax(lambda a: jax.random.key(0), x)
    assert trace.cursor.depth == 0


def test_a_partial_and_a_method(device):
    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, a):
            return a * self.by

        def twice(self, a):
            return a * self.by * 2

    x = torch.ones(2).to(device)
    scale = Scale(3)
    assert lazytpu.call_jax(functools.partial(jnp.multiply, 2), x).tolist() == [2, 2]
    assert lazytpu.call_jax(scale, x).tolist() == [3, 3]
    assert lazytpu.call_jax(scale.twice, x).tolist() == [6, 6]


# --- buffers ------------------------------------------------------------------------------------------------------


def test_to_jax_is_the_buffer_and_is_never_donated(device):
    x = torch.arange(4.0).to(device) * 2
    array = lazytpu.to_jax(x)
    assert isinstance(array, jax.Array)
    assert lazytpu.to_jax(x) is array
    x.add_(1)
    lazytpu.mark_step(wait=True)
    assert array.tolist() == [0, 2, 4, 6]
    assert x.tolist() == [1, 3, 5, 7]
    other = lazytpu.to_jax(x)
    for _ in range(3):
        x.mul_(2)
        lazytpu.mark_step(wait=True)
    assert other.tolist() == [1, 3, 5, 7]


def test_to_jax_in_the_middle_of_a_step(device):
    """The tensor is an input of the pending graph already when its buffer is handed out, and is then overwritten."""
    x = torch.arange(4.0).to(device)
    lazytpu.mark_step()
    y = x + 1
    array = lazytpu.to_jax(x)
    x.add_(5)
    lazytpu.mark_step(wait=True)
    assert array.tolist() == [0, 1, 2, 3]
    assert (x.tolist(), y.tolist()) == ([5, 6, 7, 8], [1, 2, 3, 4])


def test_to_jax_of_a_tensor_that_took_over_a_value(device):
    x, y = torch.arange(4.0).to(device), torch.zeros(4).to(device)
    lazytpu.mark_step()
    y.copy_(x)
    array = lazytpu.to_jax(y)
    x.add_(1)
    y.add_(2)
    lazytpu.mark_step(wait=True)
    assert array.tolist() == [0, 1, 2, 3]


def test_a_compiled_step_does_not_donate_what_was_handed_out(device):
    x = torch.zeros(3).to(device)

    @lazytpu.compile
    def step():
        x.add_(1)

    for _ in range(4):
        step()
    array = lazytpu.to_jax(x)
    before = array.tolist()
    for _ in range(3):
        step()
    lazytpu.wait()
    assert array.tolist() == before
    assert x.tolist() == [before[0] + 3] * 3


def test_a_compiled_step_does_not_donate_an_argument_that_was_handed_out(device):
    @lazytpu.compile
    def step(t):
        t.add_(1)

    for _ in range(4):
        step(torch.zeros(3).to(device))
    x = torch.zeros(3).to(device)
    array = lazytpu.to_jax(x)
    step(x)
    lazytpu.wait()
    assert array.tolist() == [0, 0, 0]
    assert x.tolist() == [1, 1, 1]


def test_views_and_types(device):
    x = torch.arange(6).to(device).reshape(2, 3)
    assert lazytpu.to_jax(x.t()[1:]).tolist() == [[1, 4], [2, 5]]
    assert lazytpu.to_jax(x).dtype == jnp.dtype("int64")
    assert lazytpu.to_jax(torch.ones(2, dtype=torch.bfloat16).to(device)).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="takes a tensor on the device, not one on cpu"):
        lazytpu.to_jax(torch.ones(1))
    with pytest.raises(RuntimeError, match="require gradient"):
        lazytpu.to_jax(torch.ones(1).to(device).requires_grad_())


def test_from_jax_shares_until_written(device):
    array = jnp.arange(4.0)
    x = lazytpu.from_jax(array)
    assert x.device == device
    assert lazytpu.to_jax(x) is array
    x.mul_(3)
    lazytpu.mark_step(wait=True)
    assert array.tolist() == [0, 1, 2, 3]
    assert x.tolist() == [0, 3, 6, 9]
    with pytest.raises(TypeError, match="not a ndarray"):
        lazytpu.from_jax(np.ones(2))
    with pytest.raises(TypeError, match="Tracer"):
        jax.jit(lambda a: lazytpu.from_jax(a))(array)
    with pytest.raises(TypeError, match="no counterpart in torch"):
        lazytpu.from_jax(jnp.ones(2, jnp.int4))
    array.delete()
    with pytest.raises(ValueError, match="donated or deleted"):
        lazytpu.from_jax(array)


def test_dlpack(device):
    x = torch.arange(6.0).to(device).reshape(2, 3)
    for export in (np.from_dlpack, torch.from_dlpack, jnp.from_dlpack):
        assert np.asarray(export(x[1:])).tolist() == [[3, 4, 5]]
    copy = torch.from_dlpack(x)
    copy.zero_()
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x.__dlpack_device__() == (1, 0)


def test_dlpack_without_a_copy_is_the_buffer(device):
    x = torch.arange(3.0).to(device)

    class Same:
        def __dlpack_device__(self):
            return x.__dlpack_device__()

        def __dlpack__(self, **options):
            return x.__dlpack__(**{**options, "copy": False})

    shared = np.from_dlpack(Same())
    assert shared.__array_interface__["data"][0] == lazytpu.to_jax(x).unsafe_buffer_pointer()
    x.add_(1)
    lazytpu.mark_step(wait=True)
    assert shared.tolist() == [0, 1, 2]
    with pytest.raises(BufferError, match="CUDA:0 cannot have it"):
        x.__dlpack__(dl_device=(2, 0), copy=False)


# --- as_jax_function ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(4 * 9, 3)

    def forward(self, x, *, scale=1.0):
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return {"logits": self.head(self.dropout(x.flatten(1))) * scale}


def images(n=8):
    return np.random.default_rng(0).normal(size=(n, 1, 6, 6)).astype("float32")


@pytest.mark.parametrize("where", ["cpu", "tpu"])
def test_a_module_as_a_jax_function(where):
    torch.manual_seed(0)
    net = Net().to(where).eval()
    function, params = lazytpu.as_jax_function(net)
    x = images()
    wanted = net(torch.from_numpy(x).to(where), scale=2.0)["logits"]
    got = jax.jit(lambda p, x: function(p, x, scale=2.0))(params, x)["logits"]
    np.testing.assert_allclose(got, wanted.detach().cpu(), rtol=1e-5, atol=1e-6)
    assert jax.vmap(lambda one: function(params, one[None])["logits"][0])(x).shape == (8, 3)
    assert not net.training


@pytest.mark.parametrize("where", ["cpu", "tpu"])
def test_its_gradient_and_new_buffers_are_torch_s(where):
    torch.manual_seed(0)
    net = Net().to(where).train()
    function, params = lazytpu.as_jax_function(net)
    x = images()

    def loss(p):
        out, buffers = function(p, x, buffers=function.buffers)
        return (out["logits"] ** 2).sum(), buffers

    gradients, buffers = jax.jit(jax.grad(loss, has_aux=True))(params)
    (net(torch.from_numpy(x).to(where))["logits"] ** 2).sum().backward()
    for name, p in net.named_parameters():
        np.testing.assert_allclose(gradients[name], p.grad.cpu(), rtol=2e-4, atol=2e-5, err_msg=name)
    for name, b in net.named_buffers():
        np.testing.assert_allclose(buffers[name], b.cpu(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_conventions_of_gradients_are_torch_s():
    """At a tie jax's maximum has half the gradient on either side; torch's relu and max do not."""

    class Ties(nn.Module):
        def forward(self, x):
            return torch.relu(x).sum() + x.amax() + x.abs().sum() + x.max(0)[0]

    x = torch.tensor([0.0, 0.0, -1.0], requires_grad=True)
    Ties()(x).backward()
    function, _ = lazytpu.as_jax_function(Ties())
    np.testing.assert_allclose(jax.grad(lambda a: function({}, a))(jnp.asarray([0.0, 0.0, -1.0])), x.grad)


def test_second_derivatives():
    linear = nn.Linear(2, 1)
    function, params = lazytpu.as_jax_function(linear)
    hessian = jax.hessian(lambda b: (function({**params, "bias": b}, jnp.ones((3, 2))) ** 2).sum())(params["bias"])
    np.testing.assert_allclose(hessian, [[6.0]])


def test_random_numbers_come_from_the_key():
    function, params = lazytpu.as_jax_function(Net(dropout=0.5).train())
    call = functools.partial(function, params, images(), buffers=function.buffers)
    first, again, other = (call(rng=jax.random.key(k))[0]["logits"] for k in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    with pytest.raises(ValueError, match="Net draws random numbers: pass rng="):
        call()
    assert call(train=False)[0]["logits"].shape == (8, 3)


def test_lost_updates_and_wrong_names_are_refused():
    function, params = lazytpu.as_jax_function(Net().train())
    with pytest.raises(ValueError, match="Net changes its buffers norm.running_mean, .*: pass buffers="):
        function(params, images())
    with pytest.raises(ValueError, match=r"params of Net: missing \['conv.bias'\], unknown \['bias'\]"):
        function({"bias" if n == "conv.bias" else n: a for n, a in params.items()}, images())


def test_half_precision_parameters():
    function, params = lazytpu.as_jax_function(nn.Linear(3, 2))
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    assert function(half, jnp.ones((1, 3), jnp.bfloat16)).dtype == jnp.bfloat16


def test_optax_trains_a_module():
    optax = pytest.importorskip("optax")
    torch.manual_seed(0)
    net = Net(dropout=0.1).train()
    function, params = lazytpu.as_jax_function(net)
    optimizer = optax.adam(1e-2)
    x, labels = images(16), np.arange(16) % 3

    @jax.jit
    def step(params, buffers, state, key):
        def loss(p):
            out, new = function(p, x, buffers=buffers, rng=key)
            return optax.softmax_cross_entropy_with_integer_labels(out["logits"], labels).mean(), new

        (value, buffers), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), buffers, state, value

    buffers, state, losses = function.buffers, optimizer.init(params), []
    for key in jax.random.split(jax.random.key(0), 40):
        params, buffers, state, value = step(params, buffers, state, key)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 3
    assert int(buffers["norm.num_batches_tracked"]) == 40
    assert step._cache_size() <= 2  # the first call takes committed buffers or not
    net.load_state_dict({n: torch.from_numpy(np.array(a)) for n, a in (params | buffers).items()})
    wanted = net.eval()(torch.from_numpy(x))["logits"].detach()
    np.testing.assert_allclose(
        function(params, x, buffers=buffers, train=False)[0]["logits"], wanted, rtol=1e-4, atol=1e-5
    )
