"""`call_jax`: a jax function recorded as one op, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.tree_util import tree_flatten, tree_unflatten
from torch.autograd import forward_ad

from lazytpu.config import config
from lazytpu.dispatch.general import functional
from lazytpu.dtypes import to_numpy, to_torch
from lazytpu.frontends.jax import traced as jax_functions
from lazytpu.frontends.jax.arrays import from_jax
from lazytpu.frontends.jax.traced import Traced, Type, call_jax_op, traced
from lazytpu.observe import metrics
from lazytpu.runtime.least_recent import LeastRecent
from lazytpu.tracing.record import float_key, is_device_tensor

MAX_FUNCTIONS = 4096
_WIDE = {torch.int64, torch.uint64, torch.float64, torch.complex128}


@dataclass(slots=True)
class _Call:
    """What is known about calling a function with arguments of certain types.

    Attributes:
        name: of the traced function.
        constants: tensors it takes after the arguments: the arrays it closes over.
        tree: how its results nest; ``results`` is their number.
        with_residuals: operands that want a gradient, to the function to call then.
    """

    name: str
    constants: list[torch.Tensor]
    tree: Any
    results: int
    with_residuals: dict[tuple[int, ...], str]


_calls: LeastRecent[object, _Call] = LeastRecent(MAX_FUNCTIONS)


def call_jax(function: Callable[..., object], /, *args: object, **kwargs: object) -> Any:
    """Call a jax function with device tensors; the call is recorded as one op.

    The function may be anything jax can trace: ``jnp``, ``jax.vmap``, ``jax.jit`` and Pallas kernels among it.  Torch
    differentiates it with ``jax.vjp``, to any order.  It is traced once for each set of argument types, and its
    Python does not run again.

    Args:
        function: takes and returns pytrees of arrays, as ``jax.tree_util`` knows them.
        args, kwargs: pytrees.  Device tensors, jax arrays and numpy arrays in them are arrays for ``function``;
            all else (numbers, strings, None) is passed as it is and must be hashable, and the function is traced
            again for each value: give a number that changes as a tensor of no dimensions.

    Returns:
        The results, with device tensors for the arrays.

    Raises:
        TypeError: an argument cannot be hashed, or an array has a dtype that torch has not.
        RuntimeError: a tensor is on another device.
        Whatever ``function`` raises.

    Note:
        The function is traced with 64-bit types on if an argument has one of those (labels often are int64), or if
        they are on in jax, and with the precision ``lazytpu.config.matmul_precision``.

    Example:
        >>> y = lazytpu.call_jax(lambda x, w: jax.nn.gelu(x @ w), x, w)  # doctest: +SKIP
    """
    leaves, tree = tree_flatten((args, kwargs))
    keys: list[Any] = [function if function.__hash__ is not None else (id(function), type(function)), tree]
    operands: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            operands.append(leaf)
            keys.append((leaf.shape, leaf.dtype))
        elif isinstance(leaf, (jax.Array, np.ndarray)):
            operands.append(leaf)
            keys.append((leaf.shape, leaf.dtype, "array"))
        else:
            keys.append((type(leaf), float_key(leaf) if type(leaf) is float else leaf))
    keys.append((_setting("jax_enable_x64"), _setting("jax_default_matmul_precision"), config.matmul_precision))
    key = tuple(keys)
    try:
        call = _calls.find(key)
    except TypeError as error:
        raise TypeError(
            f"call_jax: an argument of {_name(function)} that is no array cannot be hashed ({error}); "
            "give it as a tensor, or bind it with functools.partial"
        ) from None
    if call is None:
        call = _new_call(function, leaves, tree)
        _calls.keep(key, call)
    tensors = [x if isinstance(x, torch.Tensor) else _operand(x) for x in operands]
    return tree_unflatten(call.tree, _record(call, tensors))


def _record(call: _Call, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    wanted = tuple([i for i, x in enumerate(tensors) if x.requires_grad]) if torch.is_grad_enabled() else ()
    operands = [*tensors, *call.constants] if call.constants else tensors
    if wanted:
        name = call.with_residuals.get(wanted)
        if name is None:
            name = call.with_residuals[wanted] = jax_functions.with_residuals(call.name, wanted).name
        return _differentiable(name, wanted, call.results, *operands)[: call.results]
    if forward_ad._current_level >= 0:
        return apply(call.name, operands)
    results: Sequence[torch.Tensor] = call_jax_op(operands, call.name)
    return results


def _new_call(function: Callable[..., Any], leaves: list[Any], tree: object) -> _Call:
    """Trace a function for arguments of these types."""
    places = [i for i, x in enumerate(leaves) if isinstance(x, (torch.Tensor, jax.Array, np.ndarray))]
    statics = [None if i in places else x for i, x in enumerate(leaves)]
    for i in places:
        if isinstance(leaves[i], torch.Tensor) and not is_device_tensor(leaves[i]) and leaves[i].device.type != "meta":
            raise RuntimeError(
                f"call_jax: Expected all tensors to be on {config.device_name}, but an argument of "
                f"{_name(function)} is on {leaves[i].device}"
            )
    arrays = [_type_of(leaves[i]) for i in places]
    wraps = [_wrapper(leaves[i]) for i in places]

    def of_arrays(*given: object) -> Any:
        full = list(statics)
        for i, wrap, x in zip(places, wraps, given, strict=True):
            full[i] = wrap(x)
        args, kwargs = tree_unflatten(tree, full)
        return function(*args, **kwargs)

    x64 = bool(_setting("jax_enable_x64")) or any(_is_wide(leaves[i]) for i in places)
    chosen = _setting("jax_default_matmul_precision") or config.matmul_precision
    with jax.default_matmul_precision(chosen), metrics.timed("trace_jax"):
        made, constants, result_tree = jax_functions.trace(_name(function), of_arrays, arrays, x64)
    metrics.count("trace_jax")
    _check_results(function, made)
    return _Call(made.name, [from_jax(jax.numpy.asarray(c)) for c in constants], result_tree, len(made.outputs), {})


def _check_results(function: Callable[..., object], made: Traced) -> None:
    for t in made.outputs:
        if not jax_functions.has_torch_type(t):
            raise TypeError(
                f"call_jax: {_name(function)} returns an array of dtype {t.dtype}, which torch does not have"
                + ("; return jax.random.key_data of it" if jax.numpy.issubdtype(t.dtype, jax.dtypes.prng_key) else "")
            )


def _name(function: Callable[..., object]) -> str:
    while not hasattr(function, "__name__") and hasattr(function, "func"):  # functools.partial
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _setting(name: str) -> Any:
    """Return a setting of jax's, as it is in this thread."""
    return getattr(jax.config, name)


def _type_of(x: Any) -> Type:
    if isinstance(x, torch.Tensor):
        return Type(tuple(x.shape), to_numpy(x.dtype))
    data = jax.random.key_data(x) if _is_key(x) else x
    return Type(data.shape, data.dtype)


def _is_wide(x: Any) -> bool:
    """Return whether an array has a type that jax has only with ``jax_enable_x64``."""
    if isinstance(x, torch.Tensor):
        return x.dtype in _WIDE
    return not _is_key(x) and bool(x.dtype.itemsize == (16 if x.dtype.kind == "c" else 8))


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key))


def _wrapper(x: Any) -> Callable[[Any], Any]:
    """Return what makes of an operand what the function is given: keys of random numbers travel as their data."""
    if not _is_key(x):
        return lambda data: data
    implementation = jax.random.key_impl(x)
    return lambda data: jax.random.wrap_key_data(data, impl=implementation)


def _operand(x: Any) -> torch.Tensor:
    if isinstance(x, np.ndarray):
        metrics.count("transfer_in")
        metrics.count("transfer_in_bytes", x.nbytes)
        with jax.enable_x64(True):
            x = jax.numpy.array(x, copy=True)
    return from_jax(jax.random.key_data(x) if _is_key(x) else x)


# --- what torch asks of the op ------------------------------------------------------------------------------------


def _meta(operands: Sequence[torch.Tensor], function: str) -> list[torch.Tensor]:
    return [torch.empty(t.shape, dtype=to_torch(t.dtype), device="meta") for t in traced(function).outputs]


class _Differentiable(torch.autograd.Function):
    """A traced function of tensors with its gradient: ``(name, operands that want one, results that count)``."""

    @staticmethod
    def forward(name: str, wanted: tuple[int, ...], own: int, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(call_jax_op(operands, name))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.name, ctx.wanted, ctx.own, *operands = inputs
        ctx.operands = len(operands)
        residuals = output[ctx.own :]
        ctx.mark_non_differentiable(*residuals)
        ctx.save_for_backward(*operands, *residuals)
        ctx.save_for_forward(*operands)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        operands, residuals = ctx.saved_tensors[: ctx.operands], ctx.saved_tensors[ctx.operands :]
        function = traced(ctx.name)
        given: list[Any] = [
            _zeros(function.outputs[i], operands[0]) if gradients[i] is None else gradients[i]
            for i in jax_functions.floating(function.outputs[: ctx.own])
        ]
        # With create_graph the gradient is differentiated in turn, so it is computed from the operands.
        if function.pullback is None or torch.is_grad_enabled():
            results = apply(jax_functions.gradient_of(ctx.name, ctx.wanted, ctx.own), [*operands, *given])
        else:
            results = apply(jax_functions.pullback_of(ctx.name), [*residuals, *given])
        found = iter(results)
        return None, None, None, *[next(found) if i in ctx.wanted else None for i in range(ctx.operands)]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moving = tuple([i for i, t in enumerate(tangents[3:]) if t is not None])
        name = jax_functions.tangent_of(ctx.name, moving, ctx.own)
        results = iter(apply(name, [*ctx.saved_tensors[: ctx.operands], *[tangents[3 + i] for i in moving]]))
        types = traced(ctx.name).outputs
        found = [next(results) if i in jax_functions.floating(types[: ctx.own]) else None for i in range(len(types))]
        return tuple(found)

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], name: str, wanted: Any, own: int, *operands: torch.Tensor) -> Any:
        results = apply(jax_functions.batched(name, tuple(axes[3:]), info.batch_size), operands)
        return tuple(results), (0,) * len(results)


class _Quick(torch.autograd.Function):
    """The same outside of torch.func, where torch does not look at the signature in each call."""

    @staticmethod
    def forward(
        ctx: Any, name: str, wanted: tuple[int, ...], own: int, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        results = tuple(call_jax_op(operands, name))
        _Differentiable.setup_context(ctx, (name, wanted, own, *operands), results)
        return results

    backward = _Differentiable.backward
    jvp = _Differentiable.jvp


def _differentiable(*args: object) -> Sequence[torch.Tensor]:
    apply: Callable[..., Sequence[torch.Tensor]] = _Quick.apply
    if torch._C._are_functorch_transforms_active():
        apply = _Differentiable.apply
    return apply(*args)


def _zeros(t: Type, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape, dtype=to_torch(t.dtype), device=like.device)


def apply(name: str, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Call a traced function so that torch can differentiate it."""
    wanted = tuple([i for i, x in enumerate(tensors) if x.requires_grad]) if torch.is_grad_enabled() else ()
    if wanted or forward_ad._current_level >= 0:
        return _differentiable(name, wanted, len(traced(name).outputs), *tensors)
    results: Sequence[torch.Tensor] = call_jax_op(tensors, name)
    return results


def _vmap(info: Any, axes: Any, operands: Sequence[torch.Tensor], function: str) -> tuple[Any, Any]:
    name = jax_functions.batched(function, tuple(axes[0]), info.batch_size)
    results = call_jax_op(operands, name)
    return results, [0] * len(results)


def register() -> None:
    """Teach torch the op; called once, by ``import lazytpu``."""
    library = jax_functions.library
    library.impl("call_jax", functional(call_jax_op), "PrivateUse1")
    library.impl("call_jax", _meta, "Meta")
    torch.library.register_vmap(call_jax_op, _vmap, lib=library)
