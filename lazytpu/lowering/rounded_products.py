"""Products that ops add to: ``a * x + b * x``, ``y - y.amax()`` and ``y.softmax(-1)`` where ``y`` is ``x * 0.1``.

LLVM makes one instruction of a product and the sum that reads it, which leaves out the rounding of the product: what
cancels on the CPU then leaves what the rounding took, 5e21 in place of 0 for factors of 1e20 and 1e10.  XLA computes a
cheap value anew in the loop of each of its readers, too, so that a product less its own maximum is not 0, and its root
is NaN (docs/explanation/xla-bugs.md).  Here the products are found that ops read which add or subtract; `rounded_as_is`
keeps their rounding at the cost of a comparison, which is none in loops that wait for memory.

Lists of tensors (`torch._foreach_add_`), as optimizers have them, are left as they are: their terms do not cancel.
"""

from __future__ import annotations

import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.registry import target_platform

_WIDE = (torch.float32, torch.float64)  # halves are rounded by an instruction, complex products are sums

# Their results are elements of their operands, but for the sign.
_PICKING = """
    abs alias as_strided cat clamp clamp_max clamp_min clone constant_pad_nd contiguous copy detach diagonal
    embedding expand flip fmax fmin gather index index_select maximum minimum neg permute relu repeat roll select
    slice split split_with_sizes squeeze stack t take threshold transpose tril triu unbind unfold unsqueeze view
    where
""".split()
# They add nothing to their operands, or read them from memory, or their rounding hides that of an operand.
_NOT_ADDING = """
    _to_copy addmm amax amin any argmax argmin baddbmm bmm ceil convolution convolution_backward cos cosh cummax
    cummin div dot elu elu_backward eq erf exp exp2 floor ge gelu gelu_backward gt hardtanh_backward isfinite isinf
    isnan kthvalue le leaky_relu leaky_relu_backward log log10 log2 lt max max_pool2d_with_indices median min mm mul
    mv native_dropout native_dropout_backward ne nonzero reciprocal round rsqrt sigmoid sigmoid_backward sign silu
    silu_backward sin sinh sort sqrt tanh tanh_backward threshold_backward topk trunc
""".split()
# The last instruction of these is another one.
_NO_PRODUCTS = """
    _to_copy add addcdiv addcmul ceil cos div elu exp floor fmod hardtanh_backward leaky_relu leaky_relu_backward lerp
    log log1p logit reciprocal remainder round rsqrt rsub sigmoid sign sin sqrt sub tanh threshold_backward trunc
""".split()
_OF_MATRICES = {"bmm", "mm"}  # products of numbers where the inner size is 1


def products_to_round(graph: Graph) -> frozenset[Value]:
    """Return the products that ops read which add something to them; none on TPUs, whose products are rounded."""
    if target_platform() == "tpu":
        return frozenset()
    held: dict[Value, frozenset[Value]] = {}  # value: the products whose elements it holds
    wanted: set[Value] = set()
    for node in graph.nodes:
        name = getattr(getattr(node.op.recorded, "overloadpacket", None), "__name__", "")
        given = [held[x] for x in operands(node) if type(x) is Value and x in held]
        if name in _PICKING:
            held |= dict.fromkeys(node.results, frozenset().union(*given)) if given else {}
            continue
        if given and name not in _NOT_ADDING and not name.startswith("_foreach_"):
            wanted.update(*given)
        if name not in _NO_PRODUCTS and _is_product(node, name):
            held |= {v: frozenset([v]) for v in node.results if v.layout.dtype in _WIDE}
    return frozenset(wanted)


def _is_product(node: Node, name: str) -> bool:
    if name in _OF_MATRICES:
        return type(node.args[0]) is Value and node.args[0].layout.size[-1] == 1
    return torch.Tag.pointwise in getattr(node.op.recorded, "tags", ())
