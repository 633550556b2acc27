"""Fused optimizer steps and the gradient scaler's ops.

Learning rate, betas, decay and epsilon may change from step to step, so they are numbers of the graph.
Scalar maths is done in float64, maths on parameters in the type eager computes their type in.
"""

import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten


def _doubles(*numbers):
    """Return the numbers, which may be arrays of one element, as 0-d float64 arrays."""
    return tuple(jnp.asarray(n, jnp.float64).reshape(()) for n in numbers)


def _step_each(update, steps, lists, grad_scale, found_inf):
    """Apply ``update(step, param, grad, *states) -> (param, *states)`` along the lists.

    Gradients are divided by ``grad_scale`` first, and returned so; with ``found_inf`` set nothing changes.
    Returns one list each: parameters, gradients, then the states.
    """
    results = [[] for _ in lists]
    for step, *old in zip(steps, *lists, strict=True):
        dtype = compute_dtype(old[0].dtype)
        param, grad, *states = (t.astype(dtype) for t in old)
        if grad_scale is not None:
            grad = grad / grad_scale.astype(dtype).reshape(())
        param, *states = update(step, param, grad, *states)
        for kept, before, after in zip(results, old, (param, grad, *states), strict=True):
            after = after.astype(before.dtype)
            kept.append(after if found_inf is None else jnp.where(found_inf.reshape(()) != 0, before, after))
    return results


def _fused_adam(decoupled):
    """Return the rule of Adam, or with ``decoupled`` weight decay of AdamW."""

    def rule(
        out,
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        *,
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        amsgrad,
        maximize,
        grad_scale=None,
        found_inf=None,
    ):
        lr, beta1, beta2, weight_decay, eps = _doubles(lr, beta1, beta2, weight_decay, eps)

        def update(step, param, grad, exp_avg, exp_avg_sq, *top):
            (step,) = _doubles(step)
            numbers = (lr / (1 - beta1**step), jnp.sqrt(1 - beta2**step), 1 - beta1, beta2, 1 - beta2, eps)
            rate, root, rest1, keep2, rest2, tiny = (x.astype(param.dtype) for x in numbers)
            grad = -grad if maximize else grad
            if decoupled:
                param = param * (1 - lr * weight_decay).astype(param.dtype)
            else:
                grad = grad + param * weight_decay.astype(param.dtype)
            exp_avg = exp_avg + (grad - exp_avg) * rest1
            exp_avg_sq = exp_avg_sq * keep2 + grad * grad * rest2
            top = [jnp.maximum(t, exp_avg_sq) for t in top]
            largest = top[0] if top else exp_avg_sq
            param = param - rate * exp_avg / (jnp.sqrt(largest) / root + tiny)
            return param, exp_avg, exp_avg_sq, *top

        lists = [params, grads, exp_avgs, exp_avg_sqs] + ([max_exp_avg_sqs] if amsgrad else [])
        results = _step_each(update, state_steps, lists, grad_scale, found_inf)
        return (*results, *([] if amsgrad else [list(max_exp_avg_sqs)]))

    return rule


_ADAM = "lr beta1 beta2 weight_decay eps"
lowers(aten._fused_adam.default, aten._fused_adam.tensor_lr, dynamic=_ADAM)(_fused_adam(decoupled=False))
lowers(aten._fused_adamw.default, aten._fused_adamw.tensor_lr, dynamic=_ADAM)(_fused_adam(decoupled=True))


@lowers(aten._fused_sgd.default, aten._fused_sgd.tensor_lr, dynamic="weight_decay momentum lr dampening")
def fused_sgd(
    out,
    params,
    grads,
    momentum_buffer_list,
    *,
    weight_decay,
    momentum,
    lr,
    dampening,
    nesterov,
    maximize,
    is_first_step,
    grad_scale=None,
    found_inf=None,
):
    weight_decay, momentum, lr, dampening = _doubles(weight_decay, momentum, lr, dampening)

    def update(_, param, grad, *buffers):
        decay, keep, rate, rest = (x.astype(param.dtype) for x in (weight_decay, momentum, lr, 1 - dampening))
        grad = (-grad if maximize else grad) + param * decay
        if buffers:
            buffers = [grad if is_first_step else buffers[0] * keep + grad * rest]
            grad = grad + buffers[0] * keep if nesterov else buffers[0]
        return param - rate * grad, *buffers

    lists = [params, grads] + ([momentum_buffer_list] if momentum_buffer_list else [])
    results = _step_each(update, [None] * len(params), lists, grad_scale, found_inf)
    return (*results, *([] if momentum_buffer_list else [[]]))


@lowers(aten._fused_adagrad.default, aten._fused_adagrad.tensor_lr, dynamic="lr lr_decay weight_decay eps")
def fused_adagrad(
    out,
    params,
    grads,
    state_sums,
    state_steps,
    *,
    lr,
    lr_decay,
    weight_decay,
    eps,
    maximize,
    grad_scale=None,
    found_inf=None,
):
    lr, lr_decay, weight_decay, eps = _doubles(lr, lr_decay, weight_decay, eps)

    def update(step, param, grad, total):
        (step,) = _doubles(step)
        numbers = lr / (1 + (step - 1) * lr_decay), weight_decay, eps
        rate, decay, tiny = (x.astype(param.dtype) for x in numbers)
        grad = (-grad if maximize else grad) + param * decay
        total = total + grad * grad
        return param - rate * grad / (jnp.sqrt(total) + tiny), total

    results = _step_each(update, state_steps, [params, grads, state_sums], grad_scale, found_inf)
    return (*results, list(state_steps))[: len(out)]


@lowers(aten._amp_foreach_non_finite_check_and_unscale.default)
def amp_unscale(out, grads, found_inf, inv_scale):
    wide = [g.astype(compute_dtype(g.dtype)) for g in grads]
    bad = sum((jnp.any(~jnp.isfinite(g)) for g in wide), found_inf.reshape(()) != 0)
    unscaled = [(w * inv_scale.astype(w.dtype).reshape(())).astype(g.dtype) for w, g in zip(wide, grads, strict=True)]
    return unscaled, (bad != 0).astype(found_inf.dtype).reshape(found_inf.shape)


@lowers(aten._amp_update_scale.default, dynamic="scale_growth_factor scale_backoff_factor growth_interval")
def amp_update_scale(out, scale, tracker, found_inf, growth_factor, backoff_factor, growth_interval):
    """Shrink after a step with infinities; grow after ``growth_interval`` good ones unless that overflows."""
    bad = found_inf.reshape(()) != 0
    due = tracker + 1 == growth_interval
    grown = (scale * jnp.asarray(growth_factor, jnp.float64)).astype(scale.dtype)
    shrunk = (scale * jnp.asarray(backoff_factor, jnp.float64)).astype(scale.dtype)
    grown = jnp.where(due & jnp.isfinite(grown), grown, scale)
    new_tracker = jnp.where(bad | due, 0, tracker + 1).astype(tracker.dtype)
    return jnp.where(bad, shrunk, grown), new_tracker
