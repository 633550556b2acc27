"""Collectives of a program start in the order in which they were recorded, on every rank.

XLA starts operations that do not depend on each other in any order.  So the operand of a collective is made to depend
on the result of the one recorded before it, where it does not anyway.
"""

from __future__ import annotations

from typing import cast

import jax
from jax import lax

from lazytpu.ir.graph import Graph
from lazytpu.ir.rank_patterns import COLLECTIVES
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.in_place import after
from lazytpu.lowering.registry import target_platform


def collectives_before(graph: Graph) -> dict[Node, Value]:
    """Map each collective to the result of the one before it, but for those that depend on that one anyway."""
    found: dict[Node, Value] = {}
    latest: dict[Value, int] = {}  # values to how many collectives there are up to the last that they depend on
    before: Value | None = None
    count = 0
    for node in graph.nodes:
        depends = max([latest.get(x, 0) for x in operands(node) if type(x) is Value], default=0)
        if node.op.name in COLLECTIVES and 0 not in node.value.layout.size:
            if before is not None and depends < count:
                found[node] = before
            before, count = node.value, count + 1
            depends = count
        latest |= dict.fromkeys(node.results, depends)
    return found


def in_order(before: jax.Array, x: jax.Array) -> jax.Array:
    """Return ``x`` such that XLA cannot use it before a collective has given ``before``.

    A barrier lasts until XLA has scheduled the program, but not on CPUs.
    """
    if target_platform() == "cpu":
        return cast(jax.Array, after([before], x))
    return cast(jax.Array, lax.optimization_barrier((before, x))[1])
