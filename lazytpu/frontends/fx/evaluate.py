"""FX graphs of aten ops, as torch.export and make_fx give them, as functions of jax arrays.

Each op goes through its rule, as those of a recorded graph do.  Unlike a graph of the IR (`fx.to_ir` makes one), such
a function is traced by jax itself, under ``jax.jit``, ``jax.grad`` or ``jax.export``, and the sizes of its arrays may
be symbolic.  Its placeholders may be numbers, such as the ``SymInt`` of a dynamic size.  An op that writes to its
arguments is an error: ``ExportedProgram.run_decompositions`` gives graphs without them.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import jax
import torch
from torch.fx.node import Target

from lazytpu.dtypes import to_numpy
from lazytpu.errors import LazyTPUError, UnsupportedOpError
from lazytpu.frontends.fx.to_ir import STRIDED, base_of
from lazytpu.ir.op_schema import Op, OpOverload
from lazytpu.location.fx_site import site_of
from lazytpu.lowering.decompose import JaxInterpreter, Type, can_lower, lower_op
from lazytpu.lowering.lower import call_rule, check_type, scope_name
from lazytpu.lowering.registry import Args, Kwargs, rule_of

Size: TypeAlias = Any
"""A size of an array: an int, or a dimension of ``jax.export`` that stands for any."""
Sizes: TypeAlias = dict[Any, Size]
"""Torch's symbols (of sympy) to what they stand for."""


class JaxCallable(Protocol):
    """A function of jax arrays and a key of random numbers."""

    def __call__(self, *inputs: Any, rng: jax.Array | None = None) -> Any: ...


def jax_function_of(module: torch.fx.GraphModule) -> JaxCallable:
    """Return a function of jax arrays that computes what an FX graph does, through the rules.

    Args:
        module: an FX graph as described above; each node has its type in ``meta["val"]``.

    Returns:
        ``call(*inputs, rng=None)``: ``inputs`` has one array, or number, for each placeholder, and ``rng`` is the key
        ``u64[2]`` (seed, counter) of the random numbers; it returns the FX graph's output with arrays for the nodes.
        64-bit types have to be on where it is traced (``jax.enable_x64``).
        Attributes of the module that are graphs themselves are passed to the rule of the op as such functions.
    """

    def call(*inputs: Any, rng: jax.Array | None = None) -> Any:
        return _Evaluation(module, rng).evaluate(*inputs)

    return call


class _Evaluation(JaxInterpreter):
    """One tracing of an FX graph.  ``sizes`` has what each symbol of torch's stands for."""

    def __init__(self, module: torch.fx.GraphModule, rng: jax.Array | None) -> None:
        super().__init__(module, rng)
        self.sizes: Sizes = {}

    def placeholder(self, target: Target, args: Args, kwargs: Kwargs) -> object:
        given, meta = super().placeholder(target, args, kwargs), self.node.meta.get("val")
        sizes = zip(meta.shape, given.shape, strict=True) if isinstance(meta, torch.Tensor) else [(meta, given)]
        for size, n in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self.sizes.setdefault(size.node.expr, n)
        return given

    def body(self, module: torch.fx.GraphModule) -> JaxCallable:
        return jax_function_of(module)

    def higher_order(self, op: torch._ops.HigherOrderOperator, args: Args, kwargs: Kwargs) -> object:
        rule = rule_of(op)
        if rule is None:
            return super().higher_order(op, args, kwargs)
        if self.rng is not None and any(callable(x) for x in args):  # the bodies may use random numbers
            kwargs["rng"] = self.next_key()
        return list(rule(self.types(), *args, **kwargs))

    def call_aten(self, op: OpOverload, args: Args, kwargs: Kwargs) -> object:
        if op in _SIZE_OF:
            return _SIZE_OF[op](*args)
        check_functional(self.node)
        if op in STRIDED:
            check_memory(self.node)
        return super().call_aten(op, args, kwargs)

    def lower(self, op: Op, out: Any, args: Args, kwargs: Kwargs) -> Any:
        site = site_of(self.node)
        result = call_rule(op, site, scope_name(op, site), "", lambda: lower_op(op.recorded, out, args, kwargs))
        several = isinstance(out, (list, tuple))
        for wanted, x in zip(out, result, strict=True) if several else [(out, result)]:
            if x is not None and isinstance(wanted, Type):  # a gradient that nobody asked for may be None
                check_type(op, site, wanted, x)
        return result

    def type_of(self, meta: object) -> object:
        if isinstance(meta, torch.Tensor):
            return Type(tuple([self.size(n) for n in meta.shape]), to_numpy(meta.dtype))
        return self.size(meta) if isinstance(meta, torch.SymInt) else meta

    def size(self, n: int | torch.SymInt) -> Size:
        """Return a size of torch's in terms of the sizes of the arrays given."""
        return evaluate_size(n, self.sizes)


def evaluate_size(n: int | torch.SymInt, sizes: Sizes) -> Size:
    """Return what a size of torch's is, where its symbols are ``sizes``: an int, or a dimension of jax's.

    Raises:
        LazyTPUError: a symbol is not among ``sizes``.
    """
    if not isinstance(n, torch.SymInt):
        return int(n)
    from torch.utils._sympy.interp import sympy_interp  # sympy is slow to import
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Analysis(PythonReferenceAnalysis):
        maximum = staticmethod(jax.core.max_dim)
        minimum = staticmethod(jax.core.min_dim)

    expression = n.node.expr
    missing = [str(s) for s in expression.free_symbols if s not in sizes]
    if missing:
        raise LazyTPUError(f"no input has the size {', '.join(missing)}, of which a size {expression} is made")
    return sympy_interp(Analysis, sizes, expression)


def _numel(x: jax.Array) -> Size:
    total: Size = 1
    for n in x.shape:
        total = total * n
    return total


_SIZE_OF: dict[OpOverload, Any] = {
    torch.ops.aten.sym_numel.default: _numel,
    torch.ops.aten.sym_size.int: lambda x, dim: x.shape[dim],
    torch.ops.aten.sym_size.default: lambda x: list(x.shape),
}


def check_functional(node: torch.fx.Node) -> None:
    """Raise where a node writes to its arguments, or where nothing lowers its op.

    Raises:
        UnsupportedOpError: names the op and the user's line.
    """
    op: Any = node.target
    if op._schema.is_mutable:
        raise UnsupportedOpError(
            f"{op} writes to its argument, and the graph has to be functional",
            at=site_of(node).describe(),
            fix="functionalize it first, with ExportedProgram.run_decompositions({}) or torch.func.functionalize",
        )
    if not can_lower(op):
        raise UnsupportedOpError(
            f"{op} has no lowering and no decomposition",
            at=site_of(node).describe(),
            fix="add a rule (docs/how-to/add-an-op)",
        )


def check_memory(node: torch.fx.Node) -> None:
    """Raise where an ``as_strided`` reads the memory of another tensor than its operand, or in another order.

    Raises:
        UnsupportedOpError: names the op and the user's line.
    """
    operand = node.args[0]
    assert isinstance(operand, torch.fx.Node)
    x, base = operand.meta["val"], base_of(operand).meta["val"]
    if x.storage_offset() != 0 or not x.is_contiguous() or x.numel() != base.numel():
        raise UnsupportedOpError(
            f"{node.target} of a view reads the memory that lies behind it, which a function of arrays does not have",
            at=site_of(node).describe(),
            fix="call it on the tensor that owns the memory, or on a contiguous() copy",
        )
