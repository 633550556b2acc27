"""Autograd, its hooks, custom functions and checkpoints, on the device as on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.support.both_devices import DEVICES, check, given, mlp

# --- autograd -----------------------------------------------------------------------------------------------


def test_grad_and_double_backward():
    def program(device):
        x, w = given(device, (3, 4), (4, 2))
        (gx, gw) = torch.autograd.grad((x @ w).tanh().square().sum(), (x, w), create_graph=True)
        penalty = gx.norm() + gw.pow(2).sum()
        penalty.backward()
        hessian_vector = torch.autograd.grad(penalty.detach() * (x**3).sum(), x, retain_graph=True)
        return gx, gw, penalty, x.grad, w.grad, hessian_vector

    check(program)


def test_third_derivative():
    def program(device):
        x = given(device, (5,))
        out = x.sin() * x**3
        for _ in range(3):
            (out,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out

    check(program)


def test_grad_options():
    def program(device):
        x, y = given(device, (2, 2), (2, 2))
        out = (x * 2).sum()
        first = torch.autograd.grad(out, (x, y), allow_unused=True, retain_graph=True)
        second = torch.autograd.grad(out, (x, y), allow_unused=True, materialize_grads=True, retain_graph=True)
        batched = torch.autograd.grad(x * y, x, torch.eye(4, device=device).reshape(4, 2, 2), is_grads_batched=True)
        weighted = torch.autograd.grad(x * y, x, torch.full_like(x, 3.0))
        assert first[1] is None
        return first[0], second, batched, weighted

    check(program)


def test_errors_are_those_of_torch():
    def messages(device):
        x = given(device, (3,))
        y = x * x
        y.sum().backward()
        found = []
        for wrong in (
            lambda: y.sum().backward(),
            lambda: (x * 2).backward(),
            lambda: torch.autograd.grad(x.detach().sum(), x),
            lambda: x.add_(1),
            lambda: setattr(x, "grad", torch.ones(4, device=device)),
            lambda: x.detach().requires_grad_().long().requires_grad_(),
        ):
            with pytest.raises(RuntimeError) as caught:
                wrong()
            found.append(str(caught.value).replace("torch.tpu.", "torch."))
        saved = x.exp()
        with pytest.raises(RuntimeError) as caught:
            out = saved.sum() + 0
            saved.mul_(2)
            out.backward()
        found.append(str(caught.value).replace("tpuFloatType", "torch.FloatTensor"))
        return found

    assert messages("tpu") == messages("cpu")


def test_gradients_accumulate_and_are_set_to_none_or_zero():
    def program(device):
        w = nn.Parameter(torch.ones(3, device=device))
        optimizer, seen = torch.optim.SGD([w], lr=0.1), []
        for set_to_none in (True, False):
            for factor in (1.0, 2.0):
                (w * factor).sum().backward()
                seen.append(w.grad.clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert (w.grad is None) == set_to_none
        return seen, w.grad, w

    check(program)


def test_retain_grad_and_no_grad():
    def program(device):
        x = given(device, (3,))
        y = x * 2
        y.retain_grad()
        (y * y).sum().backward()
        with torch.no_grad():
            z = x * 3
        with torch.inference_mode():
            i = x * 4
        assert not z.requires_grad and i.is_inference()
        with torch.no_grad(), torch.enable_grad():
            assert (x * 1).requires_grad
        return y.grad, x.grad, z, i.clone()

    check(program)


def test_tensor_hooks():
    def program(device):
        x, order = given(device, (3,)), []
        y = x * 2
        handle = y.register_hook(lambda g: order.append("changed") or g * 10)
        y.register_hook(lambda g: order.append("seen"))
        removed = x.register_hook(lambda g: order.append("removed"))
        removed.remove()
        x.register_hook(lambda g: order.append("leaf"))

        def accumulated(p):
            order.append("accumulated")
            p.grad.add_(1)

        x.register_post_accumulate_grad_hook(accumulated)
        y.sum().backward()
        handle.remove()
        first = x.grad.clone()
        (x * 2).sum().backward()
        assert order == ["changed", "seen", "leaf", "accumulated", "leaf", "accumulated"]
        return first, x.grad

    check(program)


def test_optimizer_step_in_the_backward_pass():
    def program(device):
        model = mlp(device)
        optimizers = {p: torch.optim.Adam([p], lr=0.1, foreach=False) for p in model.parameters()}

        def update(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(given(device, (2, 4), requires_grad=False)).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        return list(model.parameters())

    check(program)


def test_module_hooks():
    def program(device):
        model, seen = mlp(device), []
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model[0].register_forward_hook(lambda m, args, out: out + 1)
        model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 3,))
        model[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
        model.register_forward_hook(lambda m, args, kwargs, out: seen.append(out.clone()), with_kwargs=True)
        handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: None)
        try:
            model(given(device, (2, 4))).sum().backward()
        finally:
            handle.remove()
        return seen, [p.grad for p in model.parameters()]

    check(program)


def test_graph_hooks_and_nodes():
    def program(device):
        x = given(device, (3,))
        y = (x * 2).exp()
        assert y.grad_fn.name() == "ExpBackward0" and y.grad_fn.next_functions[0][0].name() == "MulBackward0"
        seen = []
        y.grad_fn.register_hook(lambda gi, go: seen.append(gi[0].clone()))
        y.grad_fn.register_prehook(lambda go: (go[0] * 2,))
        y.sum().backward()
        kept = []

        def pack(t):
            kept.append(t.device.type)
            return t.cpu()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(device)):
            z = x.exp().sum()
        z.backward()
        assert kept == [torch.device(device).type]
        with torch.autograd.graph.save_on_cpu():
            (x.sin() * x).sum().backward()
        return seen, x.grad

    check(program)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale, x.detach().sign()

    @staticmethod
    def backward(ctx, grad, _):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2 * ctx.scale, None


class Straight(torch.autograd.Function):
    """Writes to its input, and leaves one gradient out."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        rounded = y.round()
        ctx.mark_non_differentiable(rounded)
        return x.mul_(2), rounded

    @staticmethod
    def backward(ctx, grad, none):
        assert none is None
        return grad * 2, None


class Doubling(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * 2


def test_custom_functions():
    def program(device):
        x = given(device, (4,))
        cube, sign = Cube.apply(x, 0.5)
        (gx,) = torch.autograd.grad(cube.sum(), x, create_graph=True)
        (ggx,) = torch.autograd.grad(gx.sum(), x)
        y = x * 1
        changed, rounded = Straight.apply(y, x)
        assert changed is y and not rounded.requires_grad
        changed.sum().backward()
        batched = torch.vmap(torch.func.grad(lambda a: Doubling.apply(a).sum()))(x.detach().reshape(2, 2))
        return cube, sign, gx, ggx, changed, rounded, x.grad, batched

    check(program)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * float("nan")

    for device in DEVICES:
        x = given(device, (2,))
        with torch.autograd.detect_anomaly(check_nan=True):
            (x.exp() * 2).sum().backward()
            with (
                pytest.warns(UserWarning, match="Error detected in BadBackward"),
                pytest.raises(RuntimeError, match="Function 'BadBackward' returned nan values in its 0th output"),
            ):
                Bad.apply(x * 1).sum().backward()


def test_gradcheck():
    x, w = (t.double().detach().requires_grad_() for t in given("tpu", (2, 3), (3, 2)))
    assert torch.autograd.gradcheck(lambda a, b: (a @ b).tanh(), (x, w))
    assert torch.autograd.gradgradcheck(lambda a, b: (a @ b).tanh(), (x, w))


# --- checkpoint ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant):
    def program(device):
        model, x = mlp(device), given(device, (2, 4))
        y = checkpoint(model, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
        z = checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)
        z.sum().backward()
        return y, x.grad, [p.grad for p in model.parameters()]

    check(program)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_draws_the_same_numbers_again(use_reentrant):
    x = torch.ones(1000, device="tpu", requires_grad=True)
    torch.manual_seed(0)
    state = torch.tpu.get_rng_state()
    out = checkpoint(lambda t: F.dropout(t, 0.5) * t, x, use_reentrant=use_reentrant)
    after = torch.tpu.get_rng_state()
    out.sum().backward()
    assert torch.equal(x.grad != 0, out != 0) and 300 < (out != 0).sum().item() < 700
    assert torch.equal(torch.tpu.get_rng_state(), after) and not torch.equal(state, after)


def test_checkpoint_under_autocast():
    x = torch.ones(4, 4, device="tpu", requires_grad=True)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        out = checkpoint(lambda t: t @ t, x, use_reentrant=False)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.tolist() == [[8.0] * 4] * 4
