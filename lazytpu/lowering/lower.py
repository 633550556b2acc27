"""From a graph to a jax function: every node through its rule, every result checked."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from keyword import iskeyword
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend import source_info_util

from lazytpu.config import config
from lazytpu.dtypes import to_numpy, to_torch, type_name
from lazytpu.errors import LoweringError
from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg, Op
from lazytpu.ir.site import Site
from lazytpu.ir.subgraph import Subgraph
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.ir.types import TensorType
from lazytpu.lowering import loop_rows
from lazytpu.lowering.bounds import report, report_rows
from lazytpu.lowering.chains import kept, links_to_keep
from lazytpu.lowering.collective_order import collectives_before, in_order
from lazytpu.lowering.decompose import Type, lower_decomposed
from lazytpu.lowering.foreach_groups import is_by_element, lower_rows, stretches_of
from lazytpu.lowering.in_place import after, reads_before
from lazytpu.lowering.loop_bodies import LOOP
from lazytpu.lowering.loops import rolled
from lazytpu.lowering.parts import Parts
from lazytpu.lowering.registry import Kwargs, Results, is_strided, on_one_cpu, rule_of
from lazytpu.lowering.rounded_products import products_to_round
from lazytpu.lowering.rules.creation import CONSTANTS
from lazytpu.lowering.rules.foreach import element_rule
from lazytpu.lowering.scalar_inputs import ScalarInputs
from lazytpu.lowering.slice_sums import SliceSums
from lazytpu.lowering.slice_writes import apart, overlapping_writes
from lazytpu.lowering.support.operands import rounded, rounded_as_is

_T = TypeVar("_T")
source_info_util.register_exclusion(str(Path(__file__).parents[1]))


def type_of(layout: TensorType) -> Type:
    """Return the XLA type of a layout; strides do not exist there."""
    return Type(layout.size, to_numpy(layout.dtype))


def function_of(graph: Graph, positions: Sequence[int] = ()) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a function of (inputs, floats f64[n], ints i64[m], complexes c128[k]) that computes the outputs.

    Scalar arrays of a kind that the graph has none of may be None.  The ``concatenated`` outputs of a graph are one.  A
    ``checked`` graph has one more result at the end, the report of indices out of range.

    Args:
        positions: of the nodes, where the graph is the body of a loop in another one.
    """
    numbered = zip(graph.nodes, positions or range(len(graph.nodes)), strict=True)
    position_of = dict(numbered) if config.dump else {}
    unrolled, graph = graph, rolled(graph)
    first = {(kind, i): start for kind, start, stop in graph.uniform for i in range(start, stop)}
    waits = reads_before(graph) if on_one_cpu() else {}
    stretches = stretches_of(graph, set(waits))
    overlapping = overlapping_writes(graph)
    before = collectives_before(graph) if graph.patterns else {}
    in_memory = links_to_keep(graph)
    to_round = products_to_round(graph) if len(graph.nodes) > 1 else frozenset()
    slices = SliceSums(graph)
    parts = Parts(graph) if graph.parts else None

    def step(
        inputs: Sequence[jax.Array], floats: jax.Array | None, ints: jax.Array | None, complexes: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        scalars = ScalarInputs({"f": floats, "i": ints, "c": complexes}, first)
        arrays = _Arrays(dict(zip(graph.inputs, inputs, strict=True)), scalars)
        values = arrays.values
        last, awaited = _last_uses(graph, stretches, waits, before), {v for reads in waits.values() for v in reads}
        ends: dict[int, list[Value]] = {}
        for value, i in last.items():
            ends.setdefault(i, []).append(value)
        checks: list[jax.Array] = []
        filled: dict[Hashable, list[jax.Array | None]] = {}
        sums = slices.call()
        for i, stretch in enumerate(stretches):
            nodes = graph.nodes[stretch.start : stretch.stop]
            scopes = [scope_name(n.op, n.site, position_of.get(n)) for n in nodes]
            if parts is not None and any(map(parts.has, nodes)):
                for node, scope in zip(nodes, scopes, strict=True):
                    values |= parts.run(node, values, partial(_run_alone, scalars, scope, node in overlapping))
            elif graph is not unrolled and (by_rows := arrays.by_rows(nodes[0], scopes[0])) is not None:
                values |= by_rows
            elif is_by_element(nodes[0]):
                needed = {v for node in nodes for v in node.results if v in awaited or last.get(v, -1) > i}
                elements = partial(_lower_element, dict(zip(nodes, scopes, strict=True)))
                values |= lower_rows(nodes, arrays.given, needed, elements)
            else:
                args, kwargs = arrays.arguments(nodes[0])
                if nodes[0] in overlapping:
                    args[1] = apart(args[1], args[0])
                if nodes[0] in before:
                    args[0] = in_order(arrays.given(before[nodes[0]]), args[0])
                if graph.checked:
                    checks += report_rows(nodes[0].op.recorded, stretch.start, args, kwargs)
                if sums is not None:
                    sums.note(nodes[0], args)
                if sums is not None and nodes[0] in sums.sums:
                    total = partial(sums.total, nodes[0])
                    values[nodes[0].value] = call_rule(nodes[0].op, nodes[0].site, scopes[0], "", total)
                else:
                    values |= _run(nodes[0], args, kwargs, scopes[0], filled)
            for value in [v for node in nodes for v in node.values if v in waits]:  # in order: the same in each process
                values[value] = after([arrays.given(v) for v in waits[value]], values[value])
            if to_round:
                for node, scope in zip(nodes, scopes, strict=True):
                    for v in [v for v in node.results if v in to_round and v in values]:
                        values[v] = call_rule(node.op, node.site, scope, "", partial(rounded_as_is, values[v]))
            if in_memory:
                values |= {v: kept(values[v]) for node in nodes for v in node.values if v in in_memory}
            for value in ends.get(i, ()):
                values.pop(value, None)
                arrays.rows.pop(value, None)
        outputs = _concatenated([arrays.given(v) for v in graph.outputs], graph.concatenated)
        return (*outputs, report(checks)) if graph.checked else tuple(outputs)

    return step


@dataclass(frozen=True, slots=True)
class _Arrays:
    """The arrays of a call of a graph: those of its values, computed so far and needed still, and its scalar inputs."""

    values: dict[Value, jax.Array]
    scalars: ScalarInputs
    rows: loop_rows.Rows = field(default_factory=dict)

    def given(self, x: Arg) -> Arg:
        """Return an argument of a node, with arrays in place of values and scalar inputs."""
        if type(x) is Value:
            return self.values[x] if x in self.values else loop_rows.row(self.rows, x)
        if type(x) is Number:
            return self.scalars[x]
        if isinstance(x, list):
            return [self.given(e) for e in x]
        return _body(x) if type(x) is Subgraph else x

    def arguments(self, node: Node) -> tuple[list[Arg], Kwargs]:
        """Return the arguments of a node."""
        return [self.given(x) for x in node.args], {k: self.given(x) for k, x in node.kwargs.items()}

    def by_rows(self, node: Node, scope: str) -> dict[Value, jax.Array] | None:
        """Run a loop, or what takes the results of all its iterations as they are; return None for other nodes."""
        call: Callable[[], dict[Value, jax.Array]]
        if node.op is LOOP:
            body = function_of(node.args[0].body, node.args[0].positions)
            call = partial(loop_rows.run, node, body, self.rows, self.given, self.scalars.arrays)
        elif loop_rows.can_take(self.rows, node):
            call = partial(loop_rows.take, self.rows, node, self.given)
        else:
            return None
        return call_rule(node.op, node.site, scope, "", call)


def _concatenated(outputs: list[jax.Array], count: int) -> list[jax.Array]:
    """Return the outputs, the last ``count`` of them as one flat array."""
    if not count:
        return outputs
    return [*outputs[:-count], lax.concatenate([x.reshape(-1) for x in outputs[-count:]], 0)]


def _last_uses(
    graph: Graph, stretches: Sequence[range], waits: dict[Value, list[Value]], before: dict[Node, Value]
) -> dict[Value, int]:
    """Map values to the last stretch that needs them, so that tracing holds few arrays; outputs to the end."""
    last: dict[Value, int] = {}
    for i, stretch in enumerate(stretches):
        for node in graph.nodes[stretch.start : stretch.stop]:
            awaited = [x for v in node.values if v in waits for x in waits[v]]
            for x in (*operands(node), *awaited, before.get(node)):
                if type(x) is Value:
                    last[x] = i
    return last | dict.fromkeys(graph.outputs, len(stretches))


def _run(
    node: Node, args: Sequence[Arg], kwargs: Kwargs, scope: str, filled: dict[Hashable, list[jax.Array | None]]
) -> dict[Value, jax.Array]:
    """Lower one node: return its values with their arrays.

    Args:
        filled: constants and what is expanded of them, one array for all that are equal; also by the array's identity.
    """
    types = _natural(node)
    out = _nest(node.structure, [None if lay is None else type_of(lay) for lay in types])
    if is_strided(node.op.recorded):
        kwargs["contiguous"] = node.args[0].layout.contiguous
    rule = rule_of(node.op.recorded)
    key: Hashable = (rule, out.shape, out.dtype) if rule in CONSTANTS else None
    if node.op.recorded is torch.ops.aten.expand.default and id(args[0]) in filled:
        key = (node.op, id(args[0]), out.shape)
    call = (
        partial(lower_decomposed, node.op.recorded, args, kwargs)
        if rule is None
        else partial(rule, out, *args, **kwargs)
    )
    results = filled.get(key) or _results(node, scope, types, call)
    if key is not None:
        filled[key] = filled[id(results[0])] = results
    pairs = zip(node.values, results, strict=True)
    return {value: _as_kept(value, result) for value, result in pairs if value is not None}


def _run_alone(
    scalars: ScalarInputs, scope: str, overlaps: bool, node: Node, values: dict[Value, jax.Array]
) -> dict[Value, jax.Array]:
    """Lower one node from the arrays of its operands: return its values with their arrays."""
    arrays = _Arrays(values, scalars)
    if is_by_element(node):
        return lower_rows([node], arrays.given, {*node.results}, partial(_lower_element, {node: scope}))
    args, kwargs = arrays.arguments(node)
    if overlaps:
        args[1] = apart(args[1], args[0])
    return _run(node, args, kwargs, scope, {})


def _lower_element(scopes: dict[Node, str], node: Node, i: int, args: Sequence[Arg], kwargs: Kwargs) -> jax.Array:
    """Lower one element of a foreach op."""
    rule, layout = element_rule(node.op.recorded), _natural(node)[i]
    assert rule is not None and layout is not None
    (result,) = _results(node, scopes[node], [layout], lambda: rule(type_of(layout), *args, **kwargs))
    return _as_kept(node.results[i], result)


def _natural(node: Node) -> Sequence[TensorType | None]:
    """Return the layouts that an op gives, before an in-place op casts them to those of its target."""
    return node.natural or [None if v is None else v.layout for v in node.values]


def _results(
    node: Node, scope: str, types: Sequence[TensorType | None], call: Callable[[], Results]
) -> list[jax.Array | None]:
    """Return the results of a rule, of the ``types`` that torch predicts."""
    given = ", ".join(repr(x.layout) for x in operands(node) if type(x) is Value)
    return _checked(node, types, _flat(call_rule(node.op, node.site, scope, given, call)))


def _as_kept(value: Value, result: jax.Array | None) -> jax.Array:
    """Return a result in the type of the value that stands for it."""
    assert result is not None
    wanted = to_numpy(value.layout.dtype)
    result = result if result.dtype == wanted else _cast(result, wanted)
    return _rounded_to_half(result) if value.layout.dtype is torch.complex32 else result


def _body(body: Subgraph) -> Callable[..., list[jax.Array]]:
    """Return a body as a function of its arguments and a key u64[2], from which each random op in it takes its own."""
    function, draws = function_of(body.graph), body.graph.counts[1] // 2

    def call(*arguments: jax.Array, rng: jax.Array | None = None) -> list[jax.Array]:
        ints = jnp.zeros(0, jnp.int64)
        if rng is not None and draws:
            salts = (jnp.arange(draws, dtype=jnp.uint64) + jnp.uint64(1)) * jnp.uint64(0xBF58476D1CE4E5B9)
            keys = jnp.stack([rng[0] ^ salts, jnp.broadcast_to(rng[1], (draws,))], axis=1)
            ints = lax.bitcast_convert_type(keys, jnp.int64).reshape(-1)
        results = function([arguments[i] for i in body.positions], None, ints, None)
        return [lax.convert_element_type(x, x.dtype) for x in results]  # no weak types: a loop's must stay the same

    return call


def call_rule(op: Op, site: Site, scope: str, given: str, call: Callable[[], _T]) -> _T:
    """Call a rule from the user's line, so that jax notes it as the source of what the rule makes.

    Args:
        scope: becomes the ``op_name`` of the HLO.
        given: the operands, for the error.
        call: calls the rule.

    Raises:
        LoweringError: the rule failed.
    """
    try:
        with jax.named_scope(scope):
            result: _T = _call_from(site)(call)
    except LoweringError:
        raise
    except Exception as error:
        raise LoweringError(
            f"{op.name} could not be lowered: {type(error).__name__}: {error}",
            at=site.text,
            given=given,
        ) from error
    return result


@cache
def _call_from(site: Site) -> Callable[[Callable[[], Results]], Results]:
    """Return a function that calls its argument from the user's line, as far as jax can see.

    jax takes the innermost frame outside its own and excluded files for the location of an operation; so
    StableHLO locations and HLO metadata carry the line where the op was recorded.
    """
    if not site.file:
        return lambda call: call()
    scope: dict[str, Callable[[Callable[[], Results]], Results]] = {}
    source = "\n" * (site.line - 1) + f"def {_function_name(site)}(call): return call()"
    exec(compile(source, site.file, "exec"), scope)
    return scope[_function_name(site)]


def _function_name(site: Site) -> str:
    name = "".join(c if c.isidentifier() or c.isdigit() else "_" for c in site.module)
    return name if name.isidentifier() and not iskeyword(name) else f"_{name}"  # "0", of a Sequential


def scope_name(op: Op, site: Site, position: int | None = None) -> str:
    """Return ``CNN/c1/aten.convolution``, the ``op_name`` of the HLO that comes of an op.

    Args:
        position: of the node in its graph, for a dump: ``CNN/c1/aten.convolution%12`` leads back to exactly one op.
    """
    module = site.module.replace(".", "/") + "/" if site.module else ""
    return module + op.name + ("" if position is None else f"%{position}")


def check_type(op: Op, site: Site, wanted: Type, result: jax.Array | None) -> None:
    """Compare a result of a rule with the type that torch predicts, whose sizes may be symbolic.

    Raises:
        LoweringError: they differ.
    """
    if result is None or result.dtype != wanted.dtype or not _same_shape(result.shape, wanted.shape):
        got = "nothing" if result is None else type_name(tuple(result.shape), to_torch(result.dtype))
        raise LoweringError(
            f"{op.name}: the rule gave {got}, torch predicts {type_name(wanted.shape, to_torch(wanted.dtype))}",
            at=site.text,
        )


def _same_shape(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(m == n for m, n in zip(a, b, strict=True))


def _nest(structure: Results, types: Sequence[Type | None]) -> Results:
    """Return the types as the results of an op nest."""
    if isinstance(structure, int):
        return types[structure]
    return type(structure)(_nest(s, types) for s in structure)


def _flat(x: Results) -> list[jax.Array | None]:
    return [leaf for e in x for leaf in _flat(e)] if isinstance(x, (list, tuple)) else [x]


def _cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = lax.real(x)
    return x.astype(dtype)


def _rounded_to_half(x: jax.Array) -> jax.Array:
    """Return a complex64 array with the values that complex32 can hold."""
    return lax.complex(*[rounded(part(x), jnp.float16) for part in (lax.real, lax.imag)])


# Arguments by which a caller says which gradients it wants; torch's types list the others all the same.
_MASKS = {"output_mask", "grad_input_mask"}


def _checked(
    node: Node, types: Sequence[TensorType | None], results: Sequence[jax.Array | None]
) -> list[jax.Array | None]:
    """Compare results with what torch predicted; return them, with zeros for gradients nobody asked for."""
    if len(results) != len(types):
        raise LoweringError(
            f"{node.op.name}: the rule gave {len(results)} results, torch predicts {len(types)}",
            at=node.site.text,
        )
    masked = not _MASKS.isdisjoint(node.op.positions)
    checked = []
    for layout, result in zip(types, results, strict=True):
        if layout is not None:
            if result is None and masked:
                result = jnp.zeros(layout.size, to_numpy(layout.dtype))
            check_type(node.op, node.site, type_of(layout), result)
        checked.append(result)
    return checked
