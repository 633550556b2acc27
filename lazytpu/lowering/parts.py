"""Lower what each device of a mesh computes with its own part of tensors, with ``jax.shard_map``.

Such a value is an array with one more dimension in front, along which the devices lie.  Each of its nodes is lowered as
one of a single device, inside of a ``shard_map`` of its own; nothing of that is left in the program that XLA makes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import PartitionSpec

from lazytpu.ir.graph import FROM_PARTS, TO_PARTS, Graph
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.sharding import named_sharding
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.rules.parts import AXIS
from lazytpu.lowering.support import shardings

Arrays = dict[Value, jax.Array]
Specs = PartitionSpec | tuple[PartitionSpec, ...]


class Parts:
    """The values of a graph of which each device has its own part."""

    def __init__(self, graph: Graph) -> None:
        self._values, self._graph = graph.parts, graph

    def has(self, node: Node) -> bool:
        """Return whether a node takes or gives such a value."""
        return any(x in self._values for x in (*node.results, *operands(node)))

    def run(self, node: Node, values: Arrays, lower: Callable[[Node, Arrays], Arrays]) -> Arrays:
        """Lower such a node; return its results.

        Args:
            values: the arrays that are known.
            lower: lowers a node of a single device, of which it is given the operands.
        """
        if node.op.name == TO_PARTS:
            lies = named_sharding(node.args[1], len(node.args[0].layout.size))
            where, whole = shardings.named(lies), shardings.padded(values[node.args[0]], lies)
            each = PartitionSpec(lies.mesh.axis_names)
            return {node.value: _mapped(lambda x: x[None], where.mesh, where.spec, each)(whole)}
        if node.op.name == FROM_PARTS:
            lies = named_sharding(node.args[1], len(node.args[0].layout.size))
            where, each = shardings.named(lies), PartitionSpec(lies.mesh.axis_names)
            whole = _mapped(lambda x: x[0], where.mesh, each, where.spec)(values[node.args[0]])
            return {node.value: shardings.cropped(whole, tuple(node.args[2]))}
        taken = [x for x in dict.fromkeys(operands(node)) if type(x) is Value]
        given = [v for v in node.values if v is not None]

        def own(*arrays: jax.Array) -> list[jax.Array]:
            pairs = zip(taken, arrays, strict=True)
            found = lower(node, {v: x[0] if v in self._values else x for v, x in pairs})
            return [found[v][None] for v in given]

        assert self._graph.mesh is not None
        grid = shardings.mesh_of(self._graph.mesh)
        line = jax.sharding.Mesh(np.asarray(grid.devices).reshape(-1), (AXIS,))
        specs = tuple([PartitionSpec(AXIS) if v in self._values else PartitionSpec() for v in taken])
        results = _mapped(own, line, specs, PartitionSpec(AXIS))(*[values[v] for v in taken])
        return dict(zip(given, results, strict=True))


def _mapped(
    function: Callable[..., object], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh, takes: Specs, gives: Specs
) -> Callable[..., Arg]:
    return jax.shard_map(function, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False)
