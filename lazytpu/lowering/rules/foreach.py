"""Foreach ops: the rule of the op on one tensor, applied to each element of the lists.

In a graph most are lowered tensor by tensor (`lazytpu.lowering.foreach_groups`), by `element_rule`.
"""

import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import Rule, lowers, rule_of
from lazytpu.lowering.support import sums
from lazytpu.lowering.support.operands import compute_dtype
from lazytpu.versions import passing_op

aten = torch.ops.aten

_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 max neg "
    "reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc zero"
).split()

# overload of a foreach op -> the op on one tensor.  A scalar stands where that op takes a tensor or a number.
_BASES = {
    **{getattr(aten, f"_foreach_{name}").default: getattr(aten, name).default for name in _UNARY},
    aten._foreach_copy.default: aten.copy.default,
    **dict.fromkeys(passing_op("aten._foreach_clone.default"), aten.clone.default),
    **dict.fromkeys(passing_op("aten._foreach_mm.default"), aten.mm.default),
    aten._foreach_lerp.List: aten.lerp.Tensor,
    aten._foreach_lerp.Scalar: aten.lerp.Scalar,
    aten._foreach_lerp.ScalarList: aten.lerp.Scalar,
    aten._foreach_pow.List: aten.pow.Tensor_Tensor,
    aten._foreach_pow.Scalar: aten.pow.Tensor_Scalar,
    aten._foreach_pow.ScalarList: aten.pow.Tensor_Scalar,
    aten._foreach_pow.ScalarAndTensor: aten.pow.Scalar,
}
for _name in ("add", "sub", "mul", "div"):
    _foreach = getattr(aten, f"_foreach_{_name}")
    for _overload in _foreach.overloads():
        if not _overload.endswith("out"):
            _BASES[getattr(_foreach, _overload)] = getattr(aten, _name).Tensor
for _name, _bound in (
    ("clamp_min", "clamp_min"),
    ("maximum", "clamp_min"),
    ("clamp_max", "clamp_max"),
    ("minimum", "clamp_max"),
):
    _foreach = getattr(aten, f"_foreach_{_name}")
    _BASES[_foreach.List] = getattr(aten, _bound).Tensor
    _BASES[_foreach.Scalar] = _BASES[_foreach.ScalarList] = getattr(aten, _bound).default


def element_rule(op: torch._ops.OpOverload) -> Rule | None:
    """Return the rule of a foreach op on one element of its lists, or None where it is not taken element by element."""
    if op in _WITH_VALUE:
        base = rule_of(_WITH_VALUE[op])
        assert base is not None
        return lambda out, x, a, b, value=1: base(out, x, a, b, value=value)
    return rule_of(_BASES[op]) if op in _BASES else None


def _element(argument, i):
    """Return the argument of the ``i``-th call: lists hold one for each, anything else serves all."""
    return argument[i] if isinstance(argument, list | tuple) else argument


def _each(base):
    """Return a rule that applies the rule of ``base``, which may be registered later, to every element."""

    def rule(out, *args, **kwargs):
        one = rule_of(base)
        return [
            one(o, *(_element(a, i) for a in args), **{k: _element(v, i) for k, v in kwargs.items()})
            for i, o in enumerate(out)
        ]

    return rule


for _op, _base in _BASES.items():
    lowers(_op)(_each(_base))


def _each_with_value(base):
    """As ``_each``, for ops whose last argument is the keyword ``value`` of ``base``."""
    rule = _each(base)

    def with_value(out, x, a, b, value=1):
        # A tensor of values holds one for each element.
        return rule(out, x, a, b, value=list(value) if getattr(value, "ndim", 0) else value)

    return with_value


_WITH_VALUE: dict[torch._ops.OpOverload, torch._ops.OpOverload] = {}
for _foreach, _base in ((aten._foreach_addcmul, aten.addcmul.default), (aten._foreach_addcdiv, aten.addcdiv.default)):
    for _overload in ("Scalar", "ScalarList", "Tensor"):
        lowers(getattr(_foreach, _overload))(_each_with_value(_base))
    _WITH_VALUE |= dict.fromkeys((_foreach.Scalar, _foreach.ScalarList), _base)


@lowers(aten._foreach_norm.Scalar)
def foreach_norm(out, xs, ord=2, dtype=None):
    norm = rule_of(aten.linalg_vector_norm.default)
    return [norm(o, x, ord, None, False, dtype=dtype) for o, x in zip(out, xs, strict=True)]


@lowers(*passing_op("aten._foreach_powsum.Scalar"))
def foreach_powsum(out, xs, ord=2, dtype=None):
    """Return the sum of ``abs(x) ** ord``: a norm without its root."""
    wide = [jnp.abs(x.astype(compute_dtype(o.dtype))) for o, x in zip(out, xs, strict=True)]
    return [sums.in_stages(x ** jnp.asarray(ord, x.dtype)).astype(o.dtype) for o, x in zip(out, wide, strict=True)]
