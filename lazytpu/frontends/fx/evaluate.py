"""FX graphs of aten ops, as torch.export and make_fx give them, as functions of jax arrays.

Each op goes through its rule, as those of a recorded graph do.  Unlike a graph of the IR (`fx_graph` makes one), such a
function is traced by jax itself, under ``jax.jit``, ``jax.grad`` or ``jax.export``, and the sizes of its arrays may
be symbolic.

What a graph has to look like: *placeholders* (tensors, or numbers such as the ``SymInt`` of a dynamic size),
*get_attr* of tensors and of other graphs, *call_function* of functional aten overloads, of ``operator.getitem`` and
of functions of sizes (``operator.mul``, ``aten.sym_size.int``, ``torch.sym_max``), and one *output*.  An op that
writes to its arguments is refused: ``ExportedProgram.run_decompositions`` gives graphs without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch.utils._pytree import tree_map

from lazytpu.dtypes import to_numpy, to_torch, type_name
from lazytpu.errors import LazyTPUError, LoweringError, UnsupportedOpError
from lazytpu.frontends.fx.site import site_of
from lazytpu.ir.op_schema import ABSENT, NO_COMPUTATION, Argument, Op, OpOverload, op_of
from lazytpu.location.site import Site
from lazytpu.lowering.lower import Type, call_from, can_lower, lower_op
from lazytpu.lowering.registry import is_strided, rule_of


def function_of(module: torch.fx.GraphModule) -> Callable[..., Any]:
    """A function of jax arrays that computes what an FX graph does, through the rules.

    Args:
        module: an FX graph as described above; each node has its type in ``meta["val"]``.

    Returns:
        ``call(*inputs, rng=None)``: ``inputs`` has one array, or number, for each placeholder, and ``rng`` is the key
        ``u64[2]`` (seed, counter) of the random numbers; it returns the FX graph's output with arrays for the nodes.
        64-bit types have to be on where it is traced (``jax.enable_x64``).
        Attributes of the module that are graphs themselves are passed to the rule of the op as such functions.
    """

    def call(*inputs: Any, rng: Any = None) -> Any:
        return _Run(module, inputs, rng).result

    return call


class _Run:
    """One tracing of an FX graph.  ``sizes`` has what each symbol of torch's stands for."""

    def __init__(self, module: torch.fx.GraphModule, inputs: Sequence[Any], rng: Any) -> None:
        self.module, self.rng, self.draws = module, rng, 0
        self.sizes: dict[Any, Any] = {}
        self.result: Any = None
        known: dict[torch.fx.Node, Any] = {}
        last_use = _last_uses(module)
        remaining = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(remaining)
                self.learn(node.meta.get("val"), known[node])
            elif node.op == "get_attr":
                known[node] = self.attribute(str(node.target))
            elif node.op == "output":
                self.result = mapped(node.args[0], known)
            elif node.op == "call_function":
                known[node] = self.call(node, mapped(node.args, known), mapped(node.kwargs, known))
            else:
                raise unexpected(node)
            for dead in last_use.get(node, ()):
                del known[dead]

    def learn(self, meta: Any, given: Any) -> None:
        """Notes what the symbols in the type of a placeholder stand for."""
        if isinstance(meta, torch.Tensor):
            pairs = list(zip(meta.shape, given.shape, strict=True))
        else:
            pairs = [(meta, given)]
        for size, n in pairs:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self.sizes.setdefault(size.node.expr, n)

    def attribute(self, target: str) -> Any:
        found = attribute(self.module, target)
        if isinstance(found, torch.fx.GraphModule):
            return function_of(found)
        return jnp.asarray(host_array(found))

    def call(self, node: torch.fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if not isinstance(target, OpOverload):
            rule = rule_of(target)
            if rule is None:
                return call_python(node, args, kwargs)
            if self.rng is not None and any(callable(x) for x in args):  # the bodies of a higher-order op may draw
                kwargs["rng"] = self.key()
            return list(rule(self.types(node), *args, **kwargs))
        if target in NO_COMPUTATION:
            return None
        size = size_of(target, args)
        if size is not None:
            return size
        check_functional(node)
        site, op = site_of(node), op_of(target)
        args, kwargs = arguments(op, args, kwargs)
        if op.random:
            kwargs["rng"] = self.key()
        if is_strided(target):
            source: Any = node.args[0]
            kwargs["contiguous"] = source.meta["val"].is_contiguous()
        out = self.types(node)
        try:
            with jax.named_scope(_scope_name(site, op)):
                result = call_from(site)(lambda: lower_op(target, out, args, kwargs))
        except LazyTPUError:
            raise
        except Exception as error:
            raise LoweringError(
                f"{op.name} could not be lowered: {type(error).__name__}: {error}", at=site.describe()
            ) from error
        _check(op, site, out, result)
        return result

    def key(self) -> Any:
        if self.rng is None:
            raise LazyTPUError("the graph draws random numbers, and no key was given for them")
        self.draws += 1
        return self.rng.at[1].add(self.draws << 40)

    def types(self, node: torch.fx.Node) -> Any:
        def of(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return Type(tuple([self.size(n) for n in x.shape]), to_numpy(x.dtype))
            return self.size(x) if isinstance(x, torch.SymInt) else x

        return tree_map(of, node.meta["val"])

    def size(self, n: Any) -> Any:
        """A size of torch's in terms of the sizes of the arrays given."""
        return evaluate(n.node.expr, self.sizes) if isinstance(n, torch.SymInt) else int(n)


def _last_uses(module: torch.fx.GraphModule) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    """Nodes to those that nobody needs after them, so that tracing holds few arrays."""
    last: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        for x in node.all_input_nodes:
            last[x] = node
    uses: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for x, node in last.items():
        uses.setdefault(node, []).append(x)
    return uses


def _scope_name(site: Site, op: Op) -> str:
    return f"{site.module.replace('.', '/')}/{op.name}" if site.module else op.name


def _check(op: Op, site: Site, types: Any, results: Any) -> None:
    """Compares what a rule gave with what torch predicted; a gradient that nobody asked for may be None."""
    wanted = types if isinstance(types, (list, tuple)) else [types]
    got = results if isinstance(results, (list, tuple)) else [results]
    for t, x in zip(wanted, got, strict=True):
        if x is not None and isinstance(t, Type) and not (_same_shape(x.shape, t.shape) and x.dtype == t.dtype):
            raise LoweringError(
                f"{op.name}: the rule gave {_type_name(x)}, torch predicts {_type_name(t)}", at=site.describe()
            )


def _same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(m == n for m, n in zip(a, b, strict=True))


def _type_name(x: Any) -> str:
    return type_name(tuple(x.shape), to_torch(x.dtype))


def evaluate(expression: Any, sizes: dict[Any, Any]) -> Any:
    """What an expression of torch's symbolic sizes is, where the symbols are ``sizes``: numbers, or sizes of jax's.

    Raises:
        LazyTPUError: a symbol is not among ``sizes``.
    """
    from torch.utils._sympy.interp import sympy_interp  # sympy is slow to import
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    class Analysis(PythonReferenceAnalysis):
        maximum = staticmethod(jax.core.max_dim)
        minimum = staticmethod(jax.core.min_dim)

    missing = [str(s) for s in expression.free_symbols if s not in sizes]
    if missing:
        raise LazyTPUError(f"no input has the size {', '.join(missing)}, of which a size {expression} is made")
    return sympy_interp(Analysis, sizes, expression)


def host_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of a tensor's contents as a numpy array with XLA's dtype for them.

    Args:
        tensor: on the CPU or on the device, of any dtype that XLA has.
    """
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    host = host.to(torch.complex64) if host.dtype is torch.complex32 else host
    wanted = to_numpy(host.dtype)
    if not host.numel():
        return np.empty(tuple(host.shape), wanted)
    return np.array(host.flatten().view(torch.uint8).numpy(), copy=True).view(wanted).reshape(tuple(host.shape))


def mapped(x: Any, known: dict[torch.fx.Node, Any]) -> Any:
    """``x`` with nodes replaced by what they stand for, in plain lists and tuples."""
    if isinstance(x, torch.fx.Node):
        return known[x]
    if isinstance(x, dict):
        return {k: mapped(v, known) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        items = [mapped(e, known) for e in x]
        return tuple(items) if isinstance(x, tuple) else items
    if isinstance(x, slice):
        return slice(*mapped((x.start, x.stop, x.step), known))
    return x


def attribute(module: torch.fx.GraphModule, target: str) -> Any:
    found: Any = module
    for name in target.split("."):
        found = getattr(found, name)
    return found


def size_of(op: OpOverload, args: Sequence[Any]) -> Any:
    """What an op that asks for sizes gives, or None for another op."""
    if op is torch.ops.aten.sym_numel.default:
        total = 1
        for n in args[0].shape:
            total = total * n
        return total
    if op is torch.ops.aten.sym_size.int:
        return args[0].shape[args[1]]
    return list(args[0].shape) if op is torch.ops.aten.sym_size.default else None


def call_python(node: torch.fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A function of sizes, or the choice of one of several results."""
    if isinstance(node.target, torch._ops.HigherOrderOperator) or not callable(node.target):
        raise UnsupportedOpError(f"{node.target} cannot be part of a graph", at=site_of(node).describe())
    function: Any = node.target
    return function(*args, **kwargs)


def check_functional(node: torch.fx.Node) -> None:
    """Raises where a node writes to its arguments, or where nothing lowers its op.

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


def arguments(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as rules are given them: without those that say nothing and those that are the schema's default."""
    bound = zip(op.arguments, op.bind(tuple(args), kwargs), strict=True)
    return op.call_form([ABSENT if _says_nothing(a, x) else list(x) if isinstance(x, tuple) else x for a, x in bound])


def _says_nothing(argument: Argument, x: Any) -> bool:
    default = argument.default
    is_default = default is not None and type(x) is type(default) and bool(x == default)
    return is_default or argument.kind in ("ignored", "generator")


def unexpected(node: torch.fx.Node) -> LazyTPUError:
    """The error for a kind of node that a graph of aten ops does not have."""
    return LazyTPUError(f"a graph of aten ops has no {node.op}", at=site_of(node).describe(), given=str(node))
