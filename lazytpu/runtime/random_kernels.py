"""Random ops where a graph is interpreted: the numbers of `rules/random_numbers`, from the same hash in numpy.

Compiling the rule of each op would take a third of a second for each shape, and a text that is written word by word has
a new one for each length.  What numpy and torch round otherwise than XLA, normal numbers and logarithms, is computed by
two programs for any shape, so that a seed gives the same numbers in each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeAlias, TypeVar

import jax
import numpy as np
import torch
from jax import lax
from numpy.typing import NDArray
from torch import Tensor

from lazytpu.dtypes import HALVES, host_tensor
from lazytpu.ir.tree import Node, Value
from lazytpu.ir.types import TensorType
from lazytpu.lowering.rules.random_numbers import mix, normals_of
from lazytpu.lowering.support.attention_blocks import rows_at_a_time
from lazytpu.runtime.composed import additive
from lazytpu.runtime.host.interrupts import uninterrupted

aten = torch.ops.aten
Key = NDArray[np.uint64]  # seed and counter
_Words = NDArray[np.uint32]
_Kind = TypeVar("_Kind", np.uint32, np.uint64)
_Number = float | Tensor  # an argument; one of numpy where it is an input of the graph
_Results = Sequence[Tensor | None]
_Function: TypeAlias = Callable[[jax.Array], jax.Array]
_mix: Callable[[_Words], _Words] = mix
_drawn_at_once: Callable[..., int] = rows_at_a_time
_AT_ONCE = 1 << 15  # words: what is hashed at once stays in the cache of a core
_SHORT = 1 << 8


def _keys(rng: Key) -> tuple[_Words, _Words]:
    keys = np.array([0x243F6A88, 0x85A308D3], np.uint32)
    for word in np.ascontiguousarray(rng).view(np.uint32):
        keys = _mix(keys ^ word) + np.uint32(0x9E3779B9)
    return keys[:1], keys[1:]


def _bits(rng: Key, size: Sequence[int]) -> _Words:
    """Return 32-bit words of the stream ``rng``."""
    k, s = _keys(rng)
    words = np.empty(math.prod(size), np.uint32)
    for part, i in _parts(words):
        a = _mix(i ^ k)
        part[:] = _mix(a + s) + a
    return words.reshape(tuple(size))


def _long_bits(rng: Key, size: Sequence[int]) -> Key:
    """Return 64-bit words of the stream ``rng``."""
    k, s = _keys(rng)
    words = np.empty(math.prod(size), np.uint64)
    for part, i in _parts(words):
        a, b = _mix(i ^ k), _mix(i + s)
        part[:] = ((_mix(a + s) + a).astype(np.uint64) << np.uint64(32)) | (_mix(b ^ k) + b).astype(np.uint64)
    return words.reshape(tuple(size))


def _parts(words: NDArray[_Kind]) -> Iterator[tuple[NDArray[_Kind], _Words]]:
    """Return the parts of an array that are hashed at once, each with the indices of its elements."""
    for start in range(0, words.size, _AT_ONCE):
        part = words[start : start + _AT_ONCE]
        yield part, np.arange(start, start + part.size).astype(np.uint32)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that numbers of a dtype are computed in."""
    return torch.float32 if dtype in HALVES or dtype.itemsize == 1 and dtype.is_floating_point else dtype


def _uniforms(rng: Key, size: Sequence[int], dtype: torch.dtype, *, open_ends: bool = False) -> Tensor:
    """Return uniform numbers of [0, 1), or (0, 1), in float32 or float64."""
    half = 0.5 if open_ends else 0.0
    if dtype == torch.float64:
        digits = 52 if open_ends else 53
        return host_tensor(((_long_bits(rng, size) >> np.uint64(64 - digits)).astype(np.float64) + half) * 2.0**-digits)
    digits = 23 if open_ends else 24
    return host_tensor(
        ((_bits(rng, size) >> np.uint32(32 - digits)).astype(np.float32) + np.float32(half)) * np.float32(2.0**-digits)
    )


def _normals(rng: Key, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    if dtype.is_complex:
        parts = _normals(rng, (2, *size), dtype.to_real()) * math.sqrt(0.5)
        return torch.complex(parts[0], parts[1])
    return _as_compiled(normals_of, _uniforms(rng, size, dtype, open_ends=True))


def _as_compiled(function: _Function, u: Tensor) -> Tensor:
    """Apply a function to numbers of (0, 1), rounded as in a compiled graph."""
    given = u.numpy().reshape(-1)
    found, start = np.empty_like(given), 0
    while start < given.size:
        length = _SHORT if given.size - start <= _SHORT else _AT_ONCE
        part = given[start : start + length]
        padded = np.pad(part, (0, length - part.size), constant_values=0.5)
        found[start : start + part.size] = np.asarray(_program(function, padded.dtype, length)(padded))[: part.size]
        start += length
    return host_tensor(found.reshape(tuple(u.shape)))


@cache
def _program(function: _Function, dtype: np.dtype[np.generic], length: int) -> Callable[..., jax.Array]:
    with uninterrupted(), jax.enable_x64(True):
        return jax.jit(function).lower(jax.ShapeDtypeStruct((length,), dtype)).compile()


def _mask(rng: Key, size: Sequence[int], p: _Number) -> Tensor:
    """Return true with probability ``p``."""
    p = p.to(_wide(p.dtype)) if isinstance(p, Tensor) else torch.tensor(float(p), dtype=torch.float64)
    limit = (p * 2.0**31).to(torch.int64)
    return host_tensor(_bits(rng, size) >> np.uint32(1)).to(torch.int64) < limit


def _integers(rng: Key, size: Sequence[int], low: _Number, high: _Number) -> Tensor:
    """Return whole numbers of [low, high); of ends that are inputs of the graph another way is taken."""
    span = (int(high) - int(low)) % (1 << 64)
    if isinstance(low, int) and isinstance(high, int) and 0 <= high - low < 1 << 32:
        found = (_bits(rng, size).astype(np.uint64) * np.uint64(span)) >> np.uint64(32)
    else:
        found = _long_bits(rng, size)
        found = found % np.uint64(span) if span else found
    return host_tensor(found.view(np.int64)) + int(low)


def _largest(dtype: torch.dtype) -> int:
    """Return the largest whole number that ``Tensor.random_`` draws."""
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return 1 if dtype == torch.bool else int(torch.iinfo(dtype).max)


def _masked_scale(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    wide = x.to(_wide(x.dtype)) * scale
    return torch.where(keep, wide, torch.zeros((), dtype=wide.dtype)).to(x.dtype)


def _share_kept(p: _Number) -> tuple[float, float]:
    """Return the share that dropout keeps, and by what it multiplies that."""
    share = 1.0 - float(p)
    return share, 1 / share if share else 0.0


def _dropout(out: TensorType, rng: Key, x: Tensor, p: _Number, train: bool | None = None) -> _Results:
    if train is False:
        return [x, torch.ones(x.shape, dtype=torch.bool)]
    share, scale = _share_kept(p)
    keep = _mask(rng, x.shape, share)
    return [_masked_scale(x, keep, scale), keep]


def _rand(out: TensorType, rng: Key, *_: object, **__: object) -> Tensor:
    return _uniforms(rng, out.size, _wide(out.dtype))


def _randn(out: TensorType, rng: Key, *_: object, **__: object) -> Tensor:
    return _normals(rng, out.size, _wide(out.dtype))


def _uniform(out: TensorType, rng: Key, x: Tensor, low: _Number = 0.0, high: _Number = 1.0, **ends: _Number) -> Tensor:
    dtype = _wide(out.dtype)
    first, last = (torch.tensor(end, dtype=dtype) for end in (ends.get("from", low), ends.get("to", high)))
    return _moved(_uniforms(rng, out.size, dtype), last - first, first)


def _normal(out: TensorType, rng: Key, mean: _Number, std: _Number = 1.0, *_: object, **__: object) -> Tensor:
    return _moved(_randn(out, rng), std, mean)


def _moved(x: Tensor, factor: _Number, shift: _Number) -> Tensor:
    """Return ``x * factor + shift``, rounded as in the compiled graph."""
    if x.dtype != torch.float32:
        return x * factor + shift
    factor, shift = (torch.as_tensor(y, dtype=x.dtype).double() for y in (factor, shift))
    return (x.double() * factor + shift).to(x.dtype)


def _bernoulli(out: TensorType, rng: Key, x: Tensor, p: _Number | None = None, **_: object) -> Tensor:
    return _mask(rng, out.size, x if p is None else p)


def _random(
    out: TensorType, rng: Key, x: Tensor, low: _Number = 0, to: _Number | None = None, **ends: _Number
) -> Tensor:
    to = ends.get("to", to)
    return _integers(rng, out.size, ends.get("from", low), _largest(out.dtype) + 1 if to is None else to)


def _randperm(out: TensorType, rng: Key, *_: object, **__: object) -> Tensor:
    return host_tensor(np.argsort(_long_bits(rng, out.size), kind="stable"))


def _multinomial(
    out: TensorType, rng: Key, weights: Tensor, count: int, replacement: bool = False, **_: object
) -> Tensor:
    weights = weights.to(_wide(weights.dtype))
    if replacement:
        sums = weights.cumsum(-1)
        return torch.searchsorted(sums / sums[..., -1:], _uniforms(rng, out.size, weights.dtype), right=True)
    waits = weights.log() - (-_uniforms(rng, weights.shape, weights.dtype, open_ends=True).log()).log()
    return waits.topk(out.size[-1])[1]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    dtype = _wide(q.dtype)
    scores = (q.to(dtype) @ _heads(q, k).to(dtype).mT) * (q.shape[-1] ** -0.5 if scale is None else float(scale))
    if bias is not None:
        scores = scores + bias.to(dtype)
    if is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, -math.inf)
    return scores


def _heads(q: Tensor, k: Tensor) -> Tensor:
    """Return keys or values with as many heads as the queries have."""
    return k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if q.shape[-3] != k.shape[-3] else k


def _dropped(weights: Tensor, p: _Number, rng: Key) -> Tensor:
    share, scale = _share_kept(p)
    return _masked_scale(weights, _mask(rng, weights.shape, share), scale)


def _attention(
    out: TensorType,
    rng: Key,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    dropout_p: _Number = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> _Results:
    shapes = [jax.ShapeDtypeStruct(tuple(x.shape), np.float32) for x in (q, k)]
    if bias is None and _drawn_at_once(*shapes):
        raise NotImplementedError("the rule draws for some rows at a time")
    scores = _scores(q, k, additive(bias, q.dtype), is_causal, scale)
    weights = _dropped(aten._safe_softmax.default(scores, -1), dropout_p, rng)
    y = weights.to(v.dtype) @ _heads(q, v)
    seeds = [host_tensor(rng[at : at + 1]).reshape(()).view(torch.int64) for at in (0, 1)]
    return [y, scores.logsumexp(-1), None, None, None, None, *seeds, None]


# An op to a function of the type of its result, the key and its arguments; an argument that is an input of the graph is
# a number of numpy.
RANDOM: dict[torch._ops.OpOverload, Callable[..., Tensor | _Results]] = {
    aten.native_dropout.default: _dropout,
    **dict.fromkeys((aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.rand_like.generator), _rand),
    **dict.fromkeys(
        (aten.randn.default, aten.randn.generator, aten.randn_like.default, aten.randn_like.generator), _randn
    ),
    aten.uniform.default: _uniform,
    aten.normal_functional.default: lambda out, rng, x, mean=0.0, std=1.0, **_: _normal(out, rng, mean, std),
    aten.normal.Tensor_float: _normal,
    aten.normal.float_Tensor: _normal,
    aten.normal.float_float: _normal,
    aten.normal.Tensor_Tensor: _normal,
    aten.exponential.default: lambda out, rng, x, lambd=1.0, **_: (
        -_as_compiled(lax.log, _uniforms(rng, out.size, _wide(out.dtype), open_ends=True)) / lambd
    ),
    **dict.fromkeys((aten.bernoulli.p, aten.bernoulli.Tensor, aten.bernoulli.default), _bernoulli),
    **dict.fromkeys(
        (aten.randint.default, aten.randint.generator),
        lambda out, rng, high, *_, **__: _integers(rng, out.size, 0, high),
    ),
    **dict.fromkeys(
        (aten.randint.low, aten.randint.low_generator),
        lambda out, rng, low, high, *_, **__: _integers(rng, out.size, low, high),
    ),
    **dict.fromkeys(
        (aten.randint_like.default, aten.randint_like.generator, aten.random.to),
        lambda out, rng, x, high, **_: _integers(rng, out.size, 0, high),
    ),
    aten.randint_like.low_dtype: lambda out, rng, x, low, high, **_: _integers(rng, out.size, low, high),
    aten.random.default: _random,
    getattr(aten.random, "from"): _random,
    aten.randperm.default: _randperm,
    aten.randperm.generator: _randperm,
    aten.multinomial.default: _multinomial,
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
}


def draw(node: Node, args: Sequence[object], kwargs: dict[str, object]) -> list[Tensor | None]:
    """Return the results of a random op, one for each of ``node.values``.

    Raises:
        KeyError: the op runs by its rule.
    """
    kernel = RANDOM[node.op.recorded]
    first = node.values[0]
    assert type(first) is Value
    rng = kwargs.pop("rng")
    found = kernel(first.layout, rng, *args, **kwargs)
    return [found] if isinstance(found, Tensor) else list(found)
