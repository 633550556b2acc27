"""What autograd, torch.func and the training helpers of torch offer, on the device as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import lazytpu

DEVICES = ("cpu", "tpu")


def close(expected, got, **tolerance) -> None:
    """Compares nests of CPU results with those of the device."""
    torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.is_tpu or pytest.fail(f"a result on {t.device}"), got)
    on_cpu = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), got)
    expected = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), expected)
    torch.testing.assert_close(on_cpu, expected, **tolerance)


def given(device, *shapes, requires_grad=True):
    torch.manual_seed(0)
    tensors = [torch.randn(s).to(device).requires_grad_(requires_grad) for s in shapes]
    return tensors if len(tensors) > 1 else tensors[0]


def mlp(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def check(program, **tolerance):
    """Runs ``program(device)`` on both devices and compares what it returns."""
    close(program("cpu"), program("tpu"), **tolerance)


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


# --- torch.func ---------------------------------------------------------------------------------------------


FUNCTIONS = {
    "vmap": lambda x, w: torch.vmap(lambda row: (row @ w).relu())(x),
    "vmap_dims": lambda x, w: torch.vmap(torch.dot, in_dims=(1, 0), out_dims=0)(w, w.t().contiguous()),
    "vmap_in_vmap": lambda x, w: torch.vmap(lambda row: torch.vmap(lambda column: row @ column, in_dims=1)(w))(x),
    "vmap_chunked": lambda x, w: torch.vmap(lambda row: row @ w, chunk_size=1)(x),
    "grad": lambda x, w: torch.func.grad(lambda a: (a @ w).tanh().sum())(x),
    "grad_and_value": lambda x, w: torch.func.grad_and_value(lambda a: (a @ w).tanh().sum())(x),
    "grad_twice": lambda x, w: torch.func.grad(lambda a: torch.func.grad(lambda b: (b**3).sum())(a).sum())(x),
    "grad_has_aux": lambda x, w: torch.func.grad(lambda a: ((a @ w).sum(), a * 2), has_aux=True)(x),
    "per_sample": lambda x, w: torch.vmap(torch.func.grad(lambda v, row: (row @ v).tanh().sum()), in_dims=(None, 0))(
        w, x
    ),
    "vjp": lambda x, w: torch.func.vjp(lambda a: a @ w, x)[1](torch.ones(3, 2, device=x.device)),
    "jvp": lambda x, w: torch.func.jvp(lambda a: (a @ w).sin(), (x,), (torch.ones_like(x),)),
    "jacrev": lambda x, w: torch.func.jacrev(lambda a: (a @ w).sin())(x),
    "jacfwd": lambda x, w: torch.func.jacfwd(lambda a: (a @ w).sin())(x),
    "hessian": lambda x, w: torch.func.hessian(lambda a: (a @ w).sin().sum())(x),
    "linearize": lambda x, w: torch.func.linearize(lambda a: (a @ w).sin(), x)[1](torch.ones_like(x)),
    "functionalize": lambda x, w: torch.func.functionalize(lambda a: a.clone().add_(1).view(-1).mul_(2))(x),
    "old_jacobian": lambda x, w: torch.autograd.functional.jacobian(lambda a: (a @ w).sin(), x, vectorize=True),
    "old_hessian": lambda x, w: torch.autograd.functional.hessian(lambda a: (a @ w).sin().sum(), x),
    "old_vjp": lambda x, w: torch.autograd.functional.vjp(lambda a: (a @ w).sum(), x)[1],
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # linearize, on the CPU too
@pytest.mark.parametrize("name", FUNCTIONS)
def test_func(name):
    check(lambda device: FUNCTIONS[name](*given(device, (3, 4), (4, 2), requires_grad=False)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode():
    import torch.autograd.forward_ad as forward

    def program(device):
        x, w = given(device, (3, 4), (4, 2), requires_grad=False)
        with forward.dual_level():
            out = (forward.make_dual(x, torch.ones_like(x)) @ w).exp()
            return tuple(forward.unpack_dual(out))

    check(program)


def test_vmap_with_random_numbers():
    def program(device):
        x = given(device, (3, 4), requires_grad=False)
        return [torch.vmap(lambda r: r + torch.rand_like(r), randomness=kind)(x) - x for kind in ("same", "different")]

    same, different = program("tpu")
    assert torch.allclose(same[0], same[1], atol=1e-6) and not torch.allclose(different[0], different[1], atol=1e-6)
    assert 0 <= different.min().item() and different.max().item() <= 1.001
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(lambda r: r + torch.rand_like(r))(given("tpu", (2, 2), requires_grad=False))


def test_functional_call_and_ensembles():
    def program(device):
        model, x = mlp(device), given(device, (5, 4), requires_grad=False)
        doubled = {k: v * 2 for k, v in model.state_dict().items()}
        out = torch.func.functional_call(model, doubled, (x,))
        grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(
            dict(model.named_parameters())
        )
        models = [mlp(device), mlp(device)]
        with torch.no_grad():
            models[1][0].weight.mul_(2)
        stacked, buffers = torch.func.stack_module_state(models)
        together = torch.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))(stacked, buffers)
        return out, grads, together

    check(program)


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


# --- helpers of training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clip_grad(norm, foreach):
    def program(device):
        model = mlp(device)
        model(given(device, (2, 4))).square().sum().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm, foreach=foreach)
        grads = [p.grad.clone() for p in model.parameters()]
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        again = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        return total, grads, again, [p.grad for p in model.parameters()]

    check(program)


def test_clip_grad_norm_of_nonfinite_gradients():
    for device in DEVICES:
        p = nn.Parameter(torch.ones(2, device=device))
        p.grad = torch.tensor([1.0, float("inf")], device=device)
        with pytest.raises(RuntimeError, match="total norm of order 2.0 for gradients from `parameters` is non-finite"):
            nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
        assert nn.utils.clip_grad_norm_([p], 1.0).item() == float("inf")


def test_clip_grad_norm_cuts_nothing():
    model = mlp("tpu")
    model(given("tpu", (2, 4))).sum().backward()
    before = lazytpu.metrics.counter("cut")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert lazytpu.metrics.counter("cut") == before


def test_parameters_to_vector():
    def program(device):
        model = mlp(device)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return vector, list(model.parameters())

    check(program)


PARAMETRIZATIONS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "orthogonal_cayley": lambda m: nn.utils.parametrizations.orthogonal(m, orthogonal_map="cayley"),
    "symmetric": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Symmetric()),
}


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrize(name):
    def program(device):
        torch.manual_seed(0)
        model = PARAMETRIZATIONS[name](nn.Linear(4, 4)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(given(device, (2, 4))).square().mean().backward()
            optimizer.step()
        weight = model.weight
        with nn.utils.parametrize.cached():
            assert model.weight is model.weight
        nn.utils.parametrize.remove_parametrizations(model, "weight")
        return weight, model.weight

    check(program, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "average",
    [
        lambda model: torch.optim.swa_utils.AveragedModel(model),
        lambda model: torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        ),
        lambda model: torch.optim.swa_utils.AveragedModel(model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9)),
    ],
)
def test_averaged_models(average):
    def program(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
        averaged, optimizer = average(model), torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
        batches = [given(device, (6, 4), requires_grad=False) * i for i in (1.0, 2.0, 3.0)]
        for x in batches:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
            schedule.step()
        torch.optim.swa_utils.update_bn(batches, averaged)
        return averaged.state_dict()["module.0.weight"], list(averaged.module.buffers()), averaged(batches[0])

    check(program, rtol=1e-4, atol=1e-5)


def test_optimizers_take_the_foreach_path():
    model = mlp("tpu")
    _, foreach = _default_to_fused_or_foreach(list(model.parameters()), differentiable=False)
    assert foreach


def test_pruning_and_skipping_initialisation():
    def program(device):
        model = mlp(device)
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        model(given(device, (2, 4))).sum().backward()
        return model[0].weight, model[0].weight_orig.grad

    check(program)
    assert nn.utils.skip_init(nn.Linear, 2, 2, device="tpu").weight.is_tpu


# --- layers made of many ops --------------------------------------------------------------------------------


def train(device, make, forward, steps=3, lr=0.05):
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, outputs = [], None
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = forward(model)
        loss = sum(o.square().mean() for o in torch.utils._pytree.tree_leaves(outputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, outputs, [p.grad for p in model.parameters()]


RNNS = {
    "LSTM": lambda: nn.LSTM(3, 4),
    "LSTM_deep": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "LSTM_projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "LSTM_without_bias": lambda: nn.LSTM(3, 4, bias=False),
    "GRU": lambda: nn.GRU(3, 4),
    "GRU_deep": lambda: nn.GRU(3, 4, num_layers=2, bidirectional=True),
    "RNN_tanh": lambda: nn.RNN(3, 4),
    "RNN_relu": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")  # on the CPU
@pytest.mark.parametrize("name", RNNS)
def test_recurrent_layers(name):
    check(lambda device: train(device, RNNS[name], lambda m: m(given(device, (3, 2, 3)))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "enforce_sorted"), [("LSTM_deep", False), ("GRU", True)])
def test_packed_sequences(name, enforce_sorted):
    def program(device):
        first = "batch_first" in RNNS[name]().__dict__ and RNNS[name]().batch_first
        lengths = torch.tensor([3, 2, 1] if enforce_sorted else [2, 3, 1])
        x = given(device, (3, 3, 3))

        def forward(model):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=enforce_sorted)
            out, state = model(packed)
            padded, sizes = nn.utils.rnn.pad_packed_sequence(out, batch_first=first)
            assert sizes.tolist() == lengths.tolist()
            return padded, state

        losses, outputs, grads = train(device, RNNS[name], forward)
        return losses, outputs, grads, x.grad

    check(program, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["LSTMCell", "GRUCell", "RNNCell"])
def test_recurrent_cells(name):
    def forward(model, device):
        state = None
        for x in given(device, (4, 2, 3)):
            state = model(x, state)
        return state

    check(lambda d: train(d, lambda: getattr(nn, name)(3, 4), lambda m: forward(m, d)), rtol=1e-4, atol=1e-5)


def test_recurrent_state_and_dropout():
    def program(device):
        torch.manual_seed(0)
        model = nn.LSTM(3, 4, num_layers=2, dropout=0.5).to(device)
        model.flatten_parameters()
        h, c = given(device, (2, 2, 4), (2, 2, 4))
        model.eval()
        out, (h, c) = model(given(device, (5, 2, 3)), (h, c))
        return out, h, c

    check(program)
    model = nn.LSTM(3, 400, num_layers=2, dropout=0.5).to("tpu")
    x = given("tpu", (5, 2, 3))
    torch.manual_seed(1)
    first = model(x)[0]
    assert not torch.equal(model(x)[0], first)
    torch.manual_seed(1)
    assert torch.equal(model(x)[0], first)


def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)


def test_transformer():
    def forward(model, device):
        source, target = given(device, (2, 5, 8), (2, 4, 8))
        mask = nn.Transformer.generate_square_subsequent_mask(4, device=device)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
        return model(source, target, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)

    check(lambda d: train(d, transformer, lambda m: forward(m, d)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder(norm_first, training):
    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)

    def program(device):
        torch.manual_seed(0)
        model, x = make().to(device), given(device, (2, 5, 8), requires_grad=False)
        if training:
            return train(device, make, lambda m: m(x))
        with torch.inference_mode():  # where torch takes its fast path
            return model(
                x, is_causal=True, mask=nn.Transformer.generate_square_subsequent_mask(5, device=device)
            ).clone()

    check(program, rtol=1e-4, atol=1e-4)


def test_multihead_attention_weights():
    def program(device):
        torch.manual_seed(0)
        model = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
        q, k = given(device, (2, 3, 8), (2, 4, 8))
        out, weights = model(q, k, k, average_attn_weights=False)
        (out.sum() + weights.square().sum()).backward()
        return out, weights, q.grad, [p.grad for p in model.parameters()]

    check(program, rtol=1e-4, atol=1e-5)


def test_deepcopy_in_the_middle_of_training_trains_alike():
    def program(device):
        model = mlp(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        x = given(device, (2, 4), requires_grad=False)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        other = copy.deepcopy(model)
        again = torch.optim.Adam(other.parameters(), lr=0.1)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for m, o in ((model, optimizer), (other, again)):
            o.zero_grad()
            m(x).square().sum().backward()
            o.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        return list(other.parameters())

    check(program, rtol=1e-4, atol=1e-5)
