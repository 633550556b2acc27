"""Products of which elements are subtracted: ``y - y.amax()`` and ``y.softmax(-1)`` where ``y`` is ``x * 0.1``.

XLA on CPUs computes a cheap value anew in the loop of each of its readers, and LLVM makes one instruction of a product
and the sum that reads it, which leaves out the rounding of the product.  The product less its own maximum is not 0
then but what the rounding took, of either sign: its root is NaN, and after a product of 1e14 so is a softmax
(docs/explanation/xla-bugs.md).  Here these products are found; in memory they are what they are for all readers.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.lowering.registry import on_one_cpu

aten = torch.ops.aten
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)  # halves are rounded by an instruction

# Their results are elements of their operands, but for the sign.
_PICKING = """
    abs alias amax amin aminmax as_strided cat clamp clamp_max clamp_min clone constant_pad_nd contiguous cummax cummin
    detach diagonal expand flip fmax fmin gather index index_select kthvalue masked_fill masked_select max
    max_pool2d_with_indices maximum median min minimum nanmedian neg permute relu repeat roll select slice sort split
    split_with_sizes squeeze stack t take topk transpose tril triu unbind unfold unsqueeze view where
""".split()
_SUBTRACTING = "add sub rsub".split()
_SUBTRACTING_THE_MAXIMUM = "_log_softmax _safe_softmax _softmax _masked_softmax logsumexp".split()
_DECIDING = """
    acos acosh asin eq ge gt le log log10 log2 lt ne pow reciprocal rsqrt sign signbit sqrt
""".split()  # of the difference of two products, as of ``b * b - 4 * a * c``, these want to know whether it is 0
_NO_PRODUCTS = {"add", "sub", "rsub", "div", "exp", "log", "sqrt"}  # the last instruction of these is another one


def products_to_keep(graph: Graph) -> frozenset[Value]:
    """Return the products that are computed once, for all of their readers; none but on one CPU."""
    if not on_one_cpu():
        return frozenset()
    equal = _Equal()
    parts: dict[Value, frozenset[int]] = {}  # value: the products whose elements it holds
    differences: dict[Value, frozenset[int]] = {}
    wanted: set[int] = set()
    for node in graph.nodes:
        name = getattr(getattr(node.op.recorded, "overloadpacket", None), "__name__", "")
        given = [parts[x] for x in operands(node) if type(x) is Value and x in parts]
        values = node.results
        if given and name in _SUBTRACTING_THE_MAXIMUM:
            wanted |= given[0]
        elif len(given) == 2 and name in _SUBTRACTING:
            wanted |= given[0] & given[1]
            if name != "add":
                differences |= dict.fromkeys(values, given[0] | given[1])
        elif name in _DECIDING:
            wanted.update(*[differences[x] for x in operands(node) if type(x) is Value and x in differences])
        if given and name in _PICKING:
            parts |= dict.fromkeys(values, given[0].union(*given))
        elif values and name not in _NO_PRODUCTS and _is_elementwise(node) and values[0].layout.dtype in _WIDE:
            parts |= dict.fromkeys(values, frozenset([equal.number(node)]))
    return frozenset([v for v, held in parts.items() if v in equal.products and held <= wanted])


class _Equal:
    """Numbers of products: equal ones for what may be equal, as where ``x * 0.1`` is written twice.

    Attributes:
        products: the values that have one.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.products: dict[Value, int] = {}

    def number(self, node: Node) -> int:
        key = node.op, self._key(node.args), self._key([*node.kwargs.items()])
        number = self._numbers.setdefault(key, len(self._numbers))
        self.products |= dict.fromkeys(node.results, number)
        return number

    def _key(self, x: Arg) -> Hashable:
        if type(x) is Value:
            return self.products.get(x, x)
        if type(x) is Number:
            return x.kind, x.dtype  # each may be the same number
        return tuple([self._key(e) for e in x]) if isinstance(x, (list, tuple)) else (type(x), x)


def _is_elementwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.op.recorded, "tags", ())
