"""torch.func and forward-mode derivatives, on the device as on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.both_devices import check, given, mlp

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
