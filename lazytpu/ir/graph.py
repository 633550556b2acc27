"""A graph: one path of the trace tree, pruned to what its outputs need.

What you read is what is compiled: the printer, the hash and the lowering all work on this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from lazytpu.ir.printer import graph_text
from lazytpu.ir.rank_patterns import COLLECTIVES
from lazytpu.ir.sharding import Mesh, Sharding, named_sharding
from lazytpu.ir.tree import Node, Number, Value, operands

SHARD = "lazytpu.shard"
"""Name of the op that lays its operand out on a mesh: ``shard(x, name of the sharding)``."""
TO_PARTS, FROM_PARTS = "lazytpu.to_parts", "lazytpu.from_parts"
"""Names of the ops between which each device computes with its own part of a tensor (`lazytpu.spmd.shard_map`).

Both take a tensor and the name of a sharding; a result of the first has the sizes of a part.
"""

_ON_MESH = {SHARD, TO_PARTS, FROM_PARTS}


@dataclass(frozen=True)
class Graph:
    """An immutable graph.

    Attributes:
        nodes: in the order they were recorded.
        inputs: the input values in use, in order of first use.
        outputs: the live values.
        donated: positions in ``inputs`` whose buffers the outputs may take over, those of one type in the order of the
            outputs that do.
        counts: lengths of the arrays of floats, ints and complex numbers.
        checked: whether the last result is the report of positions out of range (lowering/bounds.py).
        uniform: (kind, start, stop) of numbers that are one and the same, see `lazytpu.passes.uniform_scalars`.
        concatenated: how many of the last outputs, all of one dtype, the program returns as one flat array: a small
            result of its own costs more than computing it (`lazytpu.frontends.replay.capture`).
        shardings: of the outputs, None where XLA chooses; empty for a graph of one device.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    donated: tuple[int, ...]
    counts: tuple[int, int, int]
    checked: bool = False
    uniform: tuple[tuple[str, int, int], ...] = ()
    concatenated: int = 0
    shardings: tuple[Sharding | None, ...] = ()

    @cached_property
    def names(self) -> dict[Value, str]:
        """Values to their names: ``%p0`` for inputs, ``%0`` for results, ``%0.1`` among several results."""
        names = {value: f"%p{i}" for i, value in enumerate(self.inputs)}
        for i, node in enumerate(self.nodes):
            several = len(node.values) > 1
            for j, value in enumerate(node.values):
                if value is not None:
                    names[value] = f"%{i}.{j}" if several else f"%{i}"
        return names

    @cached_property
    def numbers(self) -> tuple[Number, ...]:
        """Numbers from Python, in order."""
        found: dict[tuple[str, int], Number] = {}
        for node in self.nodes:
            for x in operands(node):
                if type(x) is Number:
                    found.setdefault((x.kind, x.index), x)
        return tuple(found.values())

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes that inputs, outputs and ops of the graph lie on, all over the same devices in one order."""
        found = {v.sharding.mesh: None for v in self.inputs if v.sharding is not None}
        found |= {s.mesh: None for s in self.shardings if s is not None}
        marks = [(n.args[1], len(n.args[0].layout.size)) for n in self.nodes if n.op.name in _ON_MESH]
        found |= {named_sharding(*mark).mesh: None for mark in marks}
        return tuple(found)

    @cached_property
    def parts(self) -> frozenset[Value]:
        """The values of which each device has its own: what is computed from parts and not put together again."""
        return frozenset(own_values(self.nodes)) | {v for v in self.inputs if v.sharding is not None and v.sharding.own}

    @property
    def mesh(self) -> Mesh | None:
        """The first of the meshes; None for a graph of one device."""
        return self.meshes[0] if self.meshes else None

    @cached_property
    def patterns(self) -> tuple[str, ...]:
        """The patterns of ranks of its collectives, each once; empty for a graph that runs in this process alone."""
        return tuple(dict.fromkeys(n.args[-1] for n in self.nodes if n.op.name in COLLECTIVES))

    @cached_property
    def key(self) -> str:
        """A hash of everything that decides what the graph computes; equal graphs have equal keys."""
        text = f"{self.counts} {graph_text(self, sites=False)}"  # arrays of numbers are as long as the path has them
        return hashlib.sha256(text.encode()).hexdigest()

    def last_uses(self) -> list[list[Value]]:
        """Return for each node the values that nothing needs after it, neither a node nor who gets the outputs."""
        found: list[list[Value]] = []
        seen = set(self.outputs)
        for node in reversed(self.nodes):
            used = [x for x in operands(node) if type(x) is Value]
            ending = {v for v in (*used, *node.values) if v is not None and v not in seen}
            found.append([*ending])
            seen |= ending
        return found[::-1]

    def verify(self) -> None:
        """Check that every operand is an input or the result of an earlier node.

        Raises:
            AssertionError: the graph is malformed; this is a bug of lazytpu.
        """
        known: set[Value] = set(self.inputs)
        for node in self.nodes:
            for x in operands(node):
                assert type(x) is not Value or x in known, f"{node.op} uses {x} before it is made"
            known.update(node.results)
        assert known.issuperset(self.outputs), "an output is not made by the graph"
        assert len(set(self.donated)) == len(self.donated) and all(0 <= d < len(self.inputs) for d in self.donated)


def own_values(nodes: Iterable[Node]) -> set[Value]:
    """Return the results of nodes in order of which each device has its own."""
    found: set[Value] = set()
    for node in nodes:
        if node.op.name == TO_PARTS or (
            node.op.name != FROM_PARTS
            and any(
                type(x) is Value and (x in found or (x.sharding is not None and x.sharding.own)) for x in operands(node)
            )
        ):
            found.update(node.results)
    return found


def graph_of(
    last: Node, outputs: tuple[Value, ...], donated: tuple[Value, ...] = (), checked: Iterable[Node] = ()
) -> Graph:
    """Return the graph that ends at node ``last`` and computes ``outputs``.

    Args:
        donated: input values whose buffers may be taken over.
        checked: nodes whose positions the graph reports on; they are kept whether or not outputs need them.
    """
    roots = {*checked}
    needed = {v.node for v in outputs if v.node is not None} | roots
    kept: list[Node] = []
    inputs: dict[Value, None] = {v: None for v in outputs if v.node is None}
    for node in reversed(last.path()):
        if node not in needed:
            continue
        kept.append(node)
        for x in operands(node):
            if type(x) is Value:
                if x.node is None:
                    inputs[x] = None
                else:
                    needed.add(x.node)
    used = tuple(sorted(inputs, key=lambda v: v.index))
    positions = {v: i for i, v in enumerate(used)}
    return Graph(
        tuple(reversed(kept)),
        used,
        outputs,
        tuple([positions[v] for v in donated if v in positions]),
        last.counts,
        bool(roots),
    )
