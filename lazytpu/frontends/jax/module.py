"""`as_jax_function`: a torch module as a pure function of jax arrays, with torch's own gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from jax.tree_util import tree_flatten, tree_unflatten

from lazytpu.config import config
from lazytpu.dtypes import host_array, to_numpy, to_torch
from lazytpu.frontends.fx.evaluate import jax_function_of
from lazytpu.frontends.fx.tracing import TensorType, TracedModule, trace_module
from lazytpu.frontends.jax.traced import conjugate
from lazytpu.lowering.registry import lowering_for
from lazytpu.observe import metrics
from lazytpu.runtime import client
from lazytpu.tracing.record import float_key

Arrays = dict[str, object]


class JaxFunction:
    """A module as a pure jax function; made by `as_jax_function`.

    Attributes:
        params: name to array: copies of the module's parameters when this was made.
        buffers: the same of its buffers (BatchNorm's running statistics, say).
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._traced: dict[object, TracedModule] = {}
        self._dtypes = {n: t.dtype for n, t in (*module.named_parameters(), *module.named_buffers())}
        with jax.enable_x64(True):
            self.params: Arrays = {n: jnp.asarray(host_array(t)) for n, t in module.named_parameters()}
            self.buffers: Arrays = {n: jnp.asarray(host_array(t)) for n, t in module.named_buffers()}

    def __call__(
        self,
        params: Mapping[str, Any],
        /,
        *args: Any,
        buffers: Mapping[str, Any] | None = None,
        rng: Any = None,
        train: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the module's ``forward``.

        Args:
            params: name to array, as in ``self.params``; other floating dtypes are taken as they are.
            args, kwargs: pytrees; arrays in them are tensors for the module, all else is passed as it is and must
                be hashable.
            buffers: name to array, as in ``self.buffers``.  Buffers have no gradient.
            rng: a key of ``jax.random``, or an int, for modules that draw random numbers.
            train: whether the module is in training mode; None for the mode it is in now.

        Returns:
            What ``forward`` returns, with arrays for tensors.  With ``buffers`` a pair of that and the new buffers,
            which are the old ones where the module does not change them.

        Raises:
            ValueError: the module changes its buffers and none were given, draws random numbers and no ``rng`` was
                given, or the names are not the module's.
            UnsupportedOpError, LoweringError: an op of the module cannot be lowered.
        """
        self._check_names("params", params, self.params)
        state = self.buffers if buffers is None else buffers
        self._check_names("buffers", state, self.buffers)
        with jax.enable_x64(True), jax.default_matmul_precision(config.matmul_precision):
            given = {n: self._as_expected(n, params[n]) for n in self.params}
            held = {n: self._as_expected(n, state[n]) for n in self.buffers}
            leaves, tree = tree_flatten((args, kwargs))
            places = [i for i, x in enumerate(leaves) if hasattr(x, "dtype") and hasattr(x, "shape")]
            inputs = [jnp.asarray(leaves[i]) for i in places]
            statics = [None if i in places else x for i, x in enumerate(leaves)]
            training = self._module.training if train is None else train
            traced = self._trace(given, held, inputs, places, statics, tree, training)
            self._check_state(traced, buffers, rng)
            key = None if rng is None or not traced.random else key_of(rng)
            with lowering_for(client.platform()):
                results, updated = _run(traced, [*given.values(), *held.values(), *inputs], key)
            output = traced.unflatten(results)
            if buffers is None:
                return output
            changed = {
                n: jnp.asarray(new, jnp.asarray(state[n]).dtype) if different else state[n]
                for n, new, different in zip(self.buffers, updated, traced.changed, strict=True)
            }
            return output, changed

    def _check_names(self, what: str, given: Mapping[str, Any], own: Mapping[str, object]) -> None:
        missing, extra = sorted(set(own) - set(given)), sorted(set(given) - set(own))
        if missing or extra:
            raise ValueError(f"{what} of {type(self._module).__name__}: missing {missing}, unknown {extra}")

    def _as_expected(self, name: str, value: object) -> Any:
        """Return an array as the module takes it: jax without 64-bit types makes int32 of torch's int64."""
        array = jnp.asarray(value)
        integer = jnp.issubdtype(array.dtype, jnp.integer) and not self._dtypes[name].is_floating_point
        return array.astype(to_numpy(self._dtypes[name])) if integer else array

    def _check_state(self, traced: TracedModule, buffers: Mapping[str, object] | None, rng: object) -> None:
        name = type(self._module).__name__
        if buffers is None and any(traced.changed):
            changed = [n for n, different in zip(self.buffers, traced.changed, strict=True) if different]
            raise ValueError(
                f"{name} changes its buffers {', '.join(changed)}: pass buffers=function.buffers and keep the new ones "
                "that are returned beside the output, or train=False"
            )
        if rng is None and traced.random:
            raise ValueError(f"{name} draws random numbers: pass rng=jax.random.key(seed), or train=False")

    def _trace(
        self,
        params: Arrays,
        buffers: Arrays,
        inputs: list[Any],
        places: list[int],
        statics: list[Any],
        tree: Any,
        training: bool,
    ) -> TracedModule:
        arrays = [*params.values(), *buffers.values(), *inputs]
        frozen = tuple([(type(x), float_key(x) if type(x) is float else x) for x in statics])
        modes = tuple([m.training for m in self._module.modules()])
        key = (tuple([(x.shape, x.dtype) for x in arrays]), tuple(places), frozen, tree, training, modes)
        known = self._traced.get(key)
        if known is not None:
            return known

        def call(tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            full = list(statics)
            for i, t in zip(places, tensors, strict=True):
                full[i] = t
            arguments: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(tree, full)
            return arguments

        metrics.count("trace_module")
        with metrics.timed("trace_module"):
            made = self._traced[key] = trace_module(
                self._module,
                {n: _type_of(x) for n, x in params.items()},
                {n: _type_of(x) for n, x in buffers.items()},
                [_type_of(x) for x in inputs],
                call,
                training,
            )
        return made


def as_jax_function(module: torch.nn.Module) -> tuple[JaxFunction, Arrays]:
    """Return a torch module as a pure function of jax arrays, for ``jax.jit``, ``jax.grad``, ``jax.vmap`` and optax.

    The module is traced once for each set of argument types; its Python does not run again.  The ops go through the
    same rules as those of the lazy device, and ``jax.grad`` gives what torch's autograd does (second derivatives are
    jax's, of torch's gradient).  ``jax.jvp`` and ``jax.jacfwd`` of it are not possible.

    Args:
        module: on the CPU or the device.  It is not changed, and its parameters are copied.

    Returns:
        The function, called as ``function(params, *args, **kwargs)`` (see `JaxFunction`), and ``params``, a dictionary
        of name to array.

    Example:
        >>> function, params = lazytpu.as_jax_function(torch.nn.Linear(2, 1))
        >>> function(params, jax.numpy.ones((3, 2))).shape
        (3, 1)
    """
    function = JaxFunction(module)
    return function, dict(function.params)


def _type_of(x: Any) -> TensorType:
    return TensorType(tuple(x.shape), to_torch(x.dtype))


def key_of(rng: Any) -> Any:
    """Return the u64[2] that rules draw from, of a key of ``jax.random`` or an int."""
    if isinstance(rng, int):
        return jnp.asarray([rng % (1 << 64), 0], jnp.uint64)
    typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    words = (jax.random.key_data(rng) if typed else jnp.asarray(rng)).astype(jnp.uint32).reshape(-1, 2)
    numbers = jax.lax.bitcast_convert_type(words, jnp.uint64)
    return jnp.concatenate([numbers, jnp.zeros(1, jnp.uint64)])[:2]


def _run(traced: TracedModule, arrays: list[Any], key: Any) -> tuple[list[Any], list[Any]]:
    """Run the forward graph; ``jax.grad`` finds torch's gradient for it."""
    forward = jax_function_of(traced.forward)
    inexact = [i for i, t in enumerate(traced.types) if t.differentiable]

    @jax.custom_vjp
    def call(arrays: list[Any], key: Any) -> Any:
        return forward(*arrays, rng=key)

    def save(arrays: list[Any], key: Any) -> Any:
        return forward(*arrays, rng=key), (arrays, key)

    def pull_back(saved: Any, cotangents: Any) -> Any:
        arrays, key = saved
        with jax.enable_x64(True), jax.default_matmul_precision(config.matmul_precision):
            with lowering_for(client.platform()):
                given = [conjugate(cotangents[0][i]) for i in inexact]
                found = jax_function_of(traced.backward)(*arrays, *given, rng=key)
        gradients = [_no_gradient(x) for x in arrays]
        for i, g in zip(traced.differentiable, found, strict=True):
            gradients[i] = conjugate(g)
        return gradients, None if key is None else _no_gradient(key)

    call.defvjp(save, pull_back)
    results, updated = call(arrays, key)
    return list(results), list(updated)


def _no_gradient(x: Any) -> Any:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.zeros(x.shape, x.dtype) if inexact else np.zeros(x.shape, jax.dtypes.float0)
