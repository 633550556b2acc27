"""Proves that each row of a batch goes through a captured graph by itself, so that a batch can be padded.

Sizes are symbolic: a dimension whose size is the batch, or a multiple of it, holds the rows, those of one sample next
to each other.  Every op that touches such a tensor has to be known here; any other is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from lazytpu.errors import UnsupportedOpError

aten = torch.ops.aten
Rule = Callable[[torch.fx.Node], bool]
_DO = 'leave options={"pad": ...} out: each size of the batch then compiles its own program'


def rows_of(value: object) -> int | None:
    """Return the dimension of a tensor that holds the rows of the batch; None where none does.

    Raises:
        UnsupportedOpError: several sizes are symbolic.
    """
    if not isinstance(value, torch.Tensor):
        return None
    found = [d for d, n in enumerate(value.shape) if not isinstance(n, int)]
    if len(found) > 1:
        raise _refusal(f"a tensor has {len(found)} sizes that vary, and only that of the batch may")
    return found[0] if found else None


def prove_rows(module: torch.fx.GraphModule) -> None:
    """Check a graph.

    Raises:
        UnsupportedOpError: it may mix rows, or is not known not to; names the op and the user's line.
    """
    symbols = {s for n in module.graph.find_nodes(op="placeholder") for s in _symbols(n)}
    if len(symbols) > 1:
        raise _refusal(f"{len(symbols)} sizes vary, and only that of the batch may")
    for node in module.graph.nodes:
        if node.op == "call_function" and _touches_rows(node) and not _keeps_rows(node):
            raise _refusal(f"{node.target} may mix its rows, or is not known not to", node)
        for x in tensors_of(node):
            at = rows_of(x)
            if at is not None and not all((x.shape[at].node.expr / s).is_Integer for s in symbols):  # type: ignore[attr-defined]
                raise _refusal(f"a size is {x.shape[at]}, and no multiple of the batch", node)
    (output,) = module.graph.find_nodes(op="output")
    if any(isinstance(x.meta.get("val"), torch.SymInt) for x in output.all_input_nodes):
        raise _refusal("the function returns a size", output)


def tensors_of(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the types of the results of a node that are tensors."""
    value = node.meta.get("val")
    return [e for e in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(e, torch.Tensor)]


def _symbols(node: torch.fx.Node) -> set[object]:
    return {s for x in tensors_of(node) for n in x.shape if not isinstance(n, int) for s in n.node.expr.free_symbols}  # type: ignore[attr-defined]


def _refusal(problem: str, node: Any = None) -> UnsupportedOpError:
    trace = (node.meta.get("stack_trace") or "").strip().splitlines() if node is not None else []
    line = next((x.strip() for x in reversed(trace) if x.strip().startswith("File ")), "")
    return UnsupportedOpError(f"the batch cannot be padded: {problem}", at=line, fix=_DO)


def _touches_rows(node: torch.fx.Node) -> bool:
    around = (node, *node.all_input_nodes)
    return any(_is_size(n) for n in around) or any(rows_of(x) is not None for n in around for x in tensors_of(n))


def _is_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _keeps_rows(node: torch.fx.Node) -> bool:
    target = node.target
    if isinstance(node.meta.get("val"), torch.SymInt) or target is operator.getitem:
        return True  # a size goes where sizes are taken, or is refused there
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if any(_is_size(x) for x in node.all_input_nodes) and target.overloadpacket not in _TAKES_SIZES:
        return False
    rule = _RULES.get(target) or _RULES.get(target.overloadpacket)
    if rule is not None:
        return rule(node)
    return (
        torch.Tag.pointwise in target.tags and torch.Tag.nondeterministic_seeded not in target.tags and _aligned(node)
    )


def _rows(x: Any) -> int | None:
    return rows_of(x.meta.get("val")) if isinstance(x, torch.fx.Node) else None


def _dim(x: Any) -> int:
    return len(x.meta["val"].shape)


def _argument(node: torch.fx.Node, position: int, name: str, default: object = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _aligned(node: torch.fx.Node) -> bool:
    """Return whether operands have their rows at the same place, counted from the right, and numbers are not sizes."""
    places = set()
    for x in node.all_input_nodes:
        if not isinstance(x.meta.get("val"), torch.Tensor):
            return False
        at = _rows(x)
        if at is not None:
            places.add(_dim(x) - at)
    return len(places) <= 1


def _within(position: int, name: str) -> Rule:
    """Return the rule of an op that works along the dimensions in an argument: none may be that of the rows."""

    def rule(node: torch.fx.Node) -> bool:
        (x,) = node.all_input_nodes[:1]
        dims = _argument(node, position, name)
        if len(node.all_input_nodes) > 1 or dims is None or dims == []:
            return False
        at = _rows(x)
        return at not in {d % max(_dim(x), 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])}

    return rule


def _product(node: torch.fx.Node) -> bool:
    """Return whether a product of matrices [..., m, k] and [..., k, n], perhaps added to something, keeps the rows."""
    *added, a, b = [x for x in node.args if isinstance(x, torch.fx.Node)]
    left, right, dim = _rows(a), _rows(b), _dim(a)
    if left == dim - 1 or right == _dim(b) - 2:
        return False  # summed over
    if left is not None and right is not None and (left != right or left > dim - 3):
        return False
    return all(_rows(x) is None or _dim(x) - _rows(x) == len(node.meta["val"].shape) - _rows(node) for x in added)  # type: ignore[operator]


def _first(node: torch.fx.Node) -> bool:
    """Return whether the first operand alone has rows, as its first dimension, as convolution and pooling have them."""
    first, *others = node.all_input_nodes
    others = [x for x in others if isinstance(x.meta.get("val"), torch.Tensor)]
    dims = _dim(first)
    return _rows(first) == 0 and dims >= 3 - (node.target in _ANY_RANK) and all(_rows(x) is None for x in others)


def _attention(node: torch.fx.Node) -> bool:
    """Return whether query, key and value are [N, H, L, D] with rows first, without dropout."""
    whole = all(_dim(x) == 4 and _rows(x) in (0, None) for x in node.all_input_nodes)
    batched = all(_rows(x) == 0 for x in node.args[:3])
    return whole and batched and not _argument(node, 4, "dropout_p", 0.0)


def _layer_norm(node: torch.fx.Node) -> bool:
    x, sizes = node.args[0], node.args[1]
    at = _rows(x)
    others = [_rows(y) for y in node.all_input_nodes[1:]]
    return at is not None and at < _dim(x) - len(sizes) and not any(r is not None for r in others)  # type: ignore[arg-type]


def _linear(node: torch.fx.Node) -> bool:
    x, *others = node.all_input_nodes
    return _rows(x) not in (None, _dim(x) - 1) and all(_rows(y) is None for y in others)


def _embedding(node: torch.fx.Node) -> bool:
    return _rows(node.args[0]) is None


def _reshaped(node: torch.fx.Node) -> bool:
    """Return whether what is in front of the rows stays there: those of a sample stay next to each other then."""
    before, after = node.args[0], node
    b, a = _rows(before), _rows(after)
    if b is None or a is None:
        return False
    counts = [math.prod(x.meta["val"].shape[:at]) for x, at in ((before, b), (after, a))]  # type: ignore[union-attr]
    return bool(counts[0] == counts[1])


def _joined(node: torch.fx.Node) -> bool:
    """Return whether tensors are put side by side that have their rows at one place, or none."""
    at = {_rows(x) for x in node.args[0]}  # type: ignore[union-attr]
    dim = _argument(node, 1, "dim", 0) % len(node.meta["val"].shape)
    return len(at) == 1 and dim != _rows(node)


def _kept(node: torch.fx.Node) -> bool:
    """Return whether one operand alone has rows, which stay where they are among the dimensions, or move with them."""
    return len([x for x in node.all_input_nodes if _rows(x) is not None]) <= 1


def _filled(node: torch.fx.Node) -> bool:
    """Return whether the result has the same number everywhere."""
    return not any(isinstance(x, torch.fx.Node) for x in node.args[1:2])


_TAKES_SIZES = {aten.view, aten.reshape, aten._unsafe_view, aten.expand, aten.full, aten.zeros, aten.ones}
_ANY_RANK = {aten._native_batch_norm_legit_no_training.default}
_RULES: dict[object, Rule] = {
    **dict.fromkeys(
        (aten.sum.dim_IntList, aten.mean.dim, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.var.correction)
        + (aten.var_mean.correction, aten.std.correction, aten.any.dim, aten.all.dim, aten.logsumexp, aten.prod.dim_int)
        + (aten._softmax, aten._log_softmax, aten.softmax.int, aten.log_softmax.int, aten.cumsum, aten.cumprod)
        + (aten.max.dim, aten.min.dim, aten.flip, aten.glu),
        _within(1, "dim"),
    ),
    **dict.fromkeys((aten.select.int, aten.slice.Tensor, aten.unbind.int), _within(1, "dim")),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes, aten.topk, aten.chunk), _within(2, "dim")),
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _product),
    **dict.fromkeys(
        (aten.convolution, aten.max_pool2d_with_indices, aten.avg_pool2d, aten._adaptive_avg_pool2d), _first
    ),
    **dict.fromkeys((aten._native_batch_norm_legit_no_training, aten.upsample_nearest2d.vec), _first),
    **dict.fromkeys((aten.view, aten.reshape, aten._unsafe_view), _reshaped),
    **dict.fromkeys(
        (aten.permute, aten.transpose.int, aten.t, aten.unsqueeze, aten.squeeze.dim, aten.squeeze.dims), _kept
    ),
    **dict.fromkeys((aten.expand, aten.clone, aten._to_copy, aten.detach, aten.alias, aten.contiguous), _kept),
    **dict.fromkeys((aten.full, aten.zeros, aten.ones, aten.full_like, aten.zeros_like, aten.ones_like), _filled),
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
    aten.scaled_dot_product_attention: _attention,
    aten.native_layer_norm: _layer_norm,
    aten.embedding: _embedding,
    aten.linear: _linear,
    aten.cat: _joined,
}
