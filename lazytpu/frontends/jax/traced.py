"""A function of jax's as one op, ``lazytpu::call_jax(Tensor[] operands, str function) -> Tensor[]``.

``function`` names a `Traced` function by a hash of what it computes, so that equal functions are one attribute of
the graph, in this process and in the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from jax.extend import core
from jax.tree_util import tree_flatten, tree_unflatten

from lazytpu import dtypes
from lazytpu.errors import LazyTPUError
from lazytpu.lowering.registry import lowers

library = torch.library.Library("lazytpu", "FRAGMENT")
library.define("call_jax(Tensor[] operands, str function) -> Tensor[]")
call_jax_op = torch.ops.lazytpu.call_jax.default

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Traced:
    """A jax function, traced for operands of certain types.

    Attributes:
        name: the function's own name and a hash of what it computes.
        jaxpr: what it computes, of arrays alone.
        x64: whether 64-bit types were on when it was traced, as they then have to be when it is lowered.
        inputs, outputs: the types of the operands and results.
        residuals: the last so many results are what `pullback` needs, and not the function's.
        pullback: for such a function, ``pullback(residuals, cotangents)``.
    """

    name: str
    jaxpr: Any
    x64: bool
    inputs: tuple[Type, ...]
    outputs: tuple[Type, ...]
    residuals: int = 0
    pullback: Callable[..., Any] | None = None

    def __call__(self, *operands: Any) -> list[Any]:
        """Compute the results of arrays, here and now or in the trace that is going on."""
        with jax.enable_x64(self.x64):
            results: list[Any] = core.jaxpr_as_fun(self.jaxpr)(*operands)
        return results


_functions: dict[str, Traced] = {}


def traced(name: str) -> Traced:
    """Return the function of this name.

    Raises:
        LazyTPUError: this process has not traced it.
    """
    found = _functions.get(name)
    if found is None:
        raise LazyTPUError(f"this process knows no jax function {name}", fix="call it with lazytpu.call_jax first")
    return found


def trace(label: str, function: Callable[..., Any], inputs: Sequence[Type], x64: bool) -> tuple[Traced, list[Any], Any]:
    """Trace a function of arrays.

    Args:
        label: a name for people.
        function: of one array for each of ``inputs``; returns any pytree of arrays.

    Returns:
        The function, which takes the arrays that the original closes over after its own; these arrays; and how its
        results nest.
    """
    with jax.enable_x64(x64):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*inputs)
        leaves, tree = tree_flatten(shape)
        apart = [c for c in closed.consts if has_torch_type(c)]
        places = [i for i, c in enumerate(closed.consts) if has_torch_type(c)]

        def without_constants(*operands: object) -> list[object]:
            consts = list(closed.consts)
            for i, x in zip(places, operands[len(inputs) :], strict=True):
                consts[i] = x
            results: list[Any] = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, consts))(*operands[: len(inputs)])
            return results

        types = (*inputs, *[Type(np.shape(c), c.dtype) for c in apart])
        whole = jax.make_jaxpr(without_constants)(*types) if apart else closed
    outputs = tuple(Type(x.shape, x.dtype) for x in leaves)
    made = Traced(f"{label}#{_hash(whole, x64)}", whole, x64, tuple(types), outputs)
    return _functions.setdefault(made.name, made), apart, tree


def has_torch_type(x: object) -> bool:
    """Return whether torch has the dtype of an array or type."""
    return hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.extended) and _is_known(x.dtype)


def _is_known(dtype: object) -> bool:
    try:
        dtypes.to_torch(dtype)
    except TypeError:
        return False
    return True


def _hash(closed: Any, x64: bool) -> str:
    """Return a hash of a program; jax's text of it has everything but the contents of constants."""
    digest = hashlib.sha256(f"{x64} {closed.jaxpr}".encode())
    for c in closed.consts:
        array = np.asarray(jax.random.key_data(c) if jnp.issubdtype(c.dtype, jax.dtypes.prng_key) else c)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()[:12]


# --- functions made of functions ----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def with_residuals(name: str, wanted: tuple[int, ...]) -> Traced:
    """Return the function that also returns what its gradient with respect to the operands ``wanted`` needs.

    It is `name` itself where the residuals have types that torch does not.
    """
    function = traced(name)
    box: list[Any] = []

    def forward(*operands: Any) -> Any:
        results, pullback = jax.vjp(_part(function, operands, wanted), *[operands[i] for i in wanted])
        residuals, tree = tree_flatten(pullback)
        box[:] = [tree, len(residuals)]
        return results, residuals

    made, consts, _ = trace(f"{_label(name)}.fwd", forward, function.inputs, function.x64)
    tree, n = box
    if consts or not all(has_torch_type(t) for t in made.outputs):
        return function

    def pullback(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        return tree_unflatten(tree, residuals)(list(cotangents))

    full = Traced(made.name, made.jaxpr, made.x64, made.inputs, made.outputs, n, pullback)
    _functions[made.name] = full
    return full


@lru_cache(maxsize=4096)
def pullback_of(name: str) -> str:
    """Return the function ``(residuals, cotangents) -> gradients`` of one made by `with_residuals`."""
    function = traced(name)
    own = len(function.outputs) - function.residuals
    inexact = floating(function.outputs[:own])
    types = [*function.outputs[own:], *[function.outputs[i] for i in inexact]]

    def backward(*operands: Any) -> Any:
        residuals, given = operands[: function.residuals], operands[function.residuals :]
        assert function.pullback is not None
        return _gradients(function.pullback(residuals, _cotangents(function.outputs[:own], inexact, given)))

    return trace(f"{_label(name)}.vjp", backward, types, function.x64)[0].name


@lru_cache(maxsize=4096)
def gradient_of(name: str, wanted: tuple[int, ...], own: int) -> str:
    """Return the function ``(operands, cotangents) -> gradients``, which computes the function again.

    Args:
        wanted: the operands whose gradients it gives.
        own: how many of the results count.
    """
    function = traced(name)
    inexact = floating(function.outputs[:own])
    types = [*function.inputs, *[function.outputs[i] for i in inexact]]

    def backward(*operands: Any) -> Any:
        n = len(function.inputs)
        part = _part(function, operands[:n], wanted, own)
        _, pullback = jax.vjp(part, *[operands[i] for i in wanted])
        return _gradients(pullback(_cotangents(function.outputs[:own], inexact, operands[n:])))

    return trace(f"{_label(name)}.vjp", backward, types, function.x64)[0].name


@lru_cache(maxsize=4096)
def tangent_of(name: str, moving: tuple[int, ...], own: int) -> str:
    """Return the function ``(operands, tangents of those at moving) -> tangents of the results``."""
    function = traced(name)
    types = [*function.inputs, *[function.inputs[i] for i in moving]]

    def forward(*operands: Any) -> Any:
        n = len(function.inputs)
        part = _part(function, operands[:n], moving, own)
        _, tangents = jax.jvp(part, [operands[i] for i in moving], list(operands[n:]))
        return [tangents[i] for i in floating(function.outputs[:own])]

    return trace(f"{_label(name)}.jvp", forward, types, function.x64)[0].name


@lru_cache(maxsize=4096)
def batched(name: str, axes: tuple[int | None, ...], size: int) -> str:
    """Return the function over a batch, which lies along ``axes`` of the operands, and along axis 0 of the results."""
    function = traced(name)

    def type_of(t: Type, axis: int | None) -> Type:
        return t if axis is None else Type((*t.shape[:axis], size, *t.shape[axis:]), t.dtype)

    types = [type_of(t, a) for t, a in zip(function.inputs, axes, strict=True)]
    over = jax.vmap(function, in_axes=axes, axis_size=size)
    return trace(f"{_label(name)}.vmap", over, types, function.x64)[0].name


def _label(name: str) -> str:
    return name.rpartition("#")[0]


def _part(function: Traced, operands: Sequence[object], wanted: Sequence[int], own: int | None = None) -> Any:
    """Return the function of the operands ``wanted`` alone."""

    def part(*given: Any) -> list[Any]:
        full = list(operands)
        for i, x in zip(wanted, given, strict=True):
            full[i] = x
        return function(*full)[:own]

    return part


def floating(types: Sequence[Type]) -> list[int]:
    """Return positions of results that have a gradient."""
    return [i for i, t in enumerate(types) if jnp.issubdtype(t.dtype, jnp.inexact)]


def _cotangents(types: Sequence[Type], inexact: Sequence[int], given: Sequence[object]) -> list[object]:
    """Return a cotangent for each result; jax wants those of integers to be of a type that has no values."""
    full: list[Any] = [np.zeros(t.shape, jax.dtypes.float0) for t in types]
    for i, x in zip(inexact, given, strict=True):
        full[i] = conjugate(x)
    return full


def _gradients(given: Any) -> list[object]:
    return [conjugate(x) for x in given]


def conjugate(x: Any) -> Any:
    """Return a gradient of jax as torch has it, or the reverse: of complex numbers these are conjugates."""
    return jnp.conj(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


@lowers(call_jax_op)
def call_jax(out: object, operands: Any, function: str) -> object:
    return traced(function)(*operands)
