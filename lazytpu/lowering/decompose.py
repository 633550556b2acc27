"""Lower one op: by its rule, or by torch's own decomposition of it, traced into ops that have one.

This happens at lowering time, so the recorded graph shows what the user called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import lazytpu.lowering.rules  # noqa: F401  registers every rule
from lazytpu.dtypes import host_array, to_numpy, to_torch
from lazytpu.errors import LazyTPUError, UnsupportedOpError
from lazytpu.ir.op_schema import ABSENT, Arg, Argument, Op, OpOverload, op_of
from lazytpu.lowering.fx import AtenInterpreter
from lazytpu.lowering.registry import Args, Kwargs, Results, is_strided, rule_of

Type = jax.ShapeDtypeStruct
Decomposition: TypeAlias = Callable[..., Results]


def decomposition_of(op: OpOverload) -> Decomposition | None:
    """Return the function torch decomposes ``op`` by, or None."""
    found = decomposition_table.get(op)
    if found is None and torch._C._dispatch_has_kernel(op.name()) and _is_composite(op):
        return op.decompose
    return found


def decompositions() -> dict[OpOverload, Decomposition]:
    """Return the decompositions in use: each op without a rule that torch can write in other ops, to the function.

    A copy: changing it changes nothing.  ``torch.compile`` graphs, recorded graphs and exported ones are lowered by
    the same rules and, where there is none, by this table.

    Example:
        >>> torch.ops.aten.addcdiv.default in lazytpu.lowering.decompositions()
        False
    """
    return {op: function for op, function in Undecomposed().items() if isinstance(op, OpOverload)}


def _is_composite(op: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


class Undecomposed(dict[OpOverload, Decomposition]):
    """Decompositions of every op that has no rule, for make_fx."""

    def __init__(self) -> None:
        table = cast("dict[OpOverload, Decomposition]", decomposition_table)
        super().__init__((op, f) for op, f in table.items() if rule_of(op) is None)


def trace_decomposition(op: OpOverload, args: Sequence[Arg], kwargs: Kwargs) -> torch.fx.GraphModule:
    """Return an FX graph of ops with rules that computes ``op(*args, **kwargs)``.

    Args:
        op: an overload without a rule.
        args, kwargs: its arguments, with meta tensors for the tensors.
    """
    function = decomposition_of(op)
    assert function is not None
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(x: Arg) -> Arg:
            return torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x

        with mode:
            args, kwargs = tree_map(fake, (args, kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        positions = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

        def call(*tensors: torch.Tensor) -> Results:
            full = list(leaves)
            for i, t in zip(positions, tensors, strict=True):
                full[i] = t
            a, k = tree_unflatten(full, spec)
            return function(*a, **k)

        with torch.no_grad():
            return make_fx(call, decomposition_table=Undecomposed(), tracing_mode="fake")(
                *[leaves[i] for i in positions]
            )


def can_lower(op: OpOverload) -> bool:
    """Return whether ``op`` has a rule or a decomposition."""
    return rule_of(op) is not None or decomposition_of(op) is not None


def lower_op(op: OpOverload, out: Results, args: Sequence[Arg], kwargs: Kwargs) -> Results:
    """Apply the rule of ``op``, or the rules of its decomposition, to jax arrays."""
    rule = rule_of(op)
    return lower_decomposed(op, args, kwargs) if rule is None else rule(out, *args, **kwargs)


def lower_decomposed(op: OpOverload, args: Sequence[Arg], kwargs: Kwargs) -> Results:
    """Apply the rules of the decomposition of ``op``.

    Raises:
        UnsupportedOpError: it has none.
    """
    if decomposition_of(op) is None:
        raise UnsupportedOpError(f"{op} has no lowering and no decomposition")
    rng = kwargs.pop("rng", None)
    metas = tree_map(_to_meta, (list(args), kwargs), is_leaf=lambda x: isinstance(x, jax.Array))
    arrays = [x for x in tree_flatten((list(args), kwargs))[0] if isinstance(x, jax.Array)]
    return JaxInterpreter(trace_decomposition(op, *metas), rng).evaluate(*arrays)


def _to_meta(x: Arg) -> Arg:
    return torch.empty(x.shape, dtype=to_torch(x.dtype), device="meta") if isinstance(x, jax.Array) else x


class JaxInterpreter(AtenInterpreter):
    """Run an FX graph of aten ops on jax arrays, each op by its rule."""

    def __init__(self, module: torch.fx.GraphModule, rng: jax.Array | None = None) -> None:
        """Take a graph, and the key u64[2] (seed, counter) of its random ops."""
        super().__init__(module)
        self.rng, self._random_ops = rng, 0

    def constant(self, found: object) -> object:
        return jnp.asarray(host_array(found)) if isinstance(found, torch.Tensor) else found

    def call_aten(self, op: OpOverload, args: Args, kwargs: Kwargs) -> Results:
        named = op_of(op)
        args, kwargs = _said(named, args, kwargs)
        if named.random:
            kwargs["rng"] = self.next_key()
        if is_strided(op):
            source: Arg = self.node.args[0]
            kwargs["contiguous"] = source.meta["val"].is_contiguous()
        return self.lower(named, self.types(), args, kwargs)

    def lower(self, op: Op, out: Results, args: Args, kwargs: Kwargs) -> Results:
        """Apply the rule of an op."""
        return lower_op(op.recorded, out, args, kwargs)

    def next_key(self) -> jax.Array:
        """Return the key of the next random op."""
        if self.rng is None:
            raise LazyTPUError("the graph uses random numbers, and no key was given for them")
        self._random_ops += 1
        return self.rng.at[1].add(jnp.uint64(self._random_ops << 40))

    def types(self) -> Results:
        """Return the types that torch predicts for the results of the node."""
        return tree_map(self.type_of, self.node.meta["val"])

    def type_of(self, meta: object) -> object:
        """Return the type of an array where torch has a tensor; other things as they are."""
        return Type(tuple(meta.shape), to_numpy(meta.dtype)) if isinstance(meta, torch.Tensor) else meta


def _said(op: Op, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return arguments as rules take them: without those that say nothing and those that are the schema's default."""
    bound = zip(op.arguments, op.bind(args, kwargs), strict=True)
    return op.call_form([ABSENT if _says_nothing(a, x) else list(x) if isinstance(x, tuple) else x for a, x in bound])


def _says_nothing(argument: Argument, x: Arg) -> bool:
    default = argument.default
    is_default = default is not None and type(x) is type(default) and bool(x == default)
    return is_default or argument.kind in ("ignored", "generator")
