"""Find the numbers in which the graphs of ranks differ, where they differ in nothing else: these can be inputs.

``x[rank * n : (rank + 1) * n]`` is another program on each rank only as long as the start is part of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from lazytpu.diagnosis import events
from lazytpu.ir import changing_numbers
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.lowering.registry import dynamic_arguments


def attributes(graph: Graph) -> list[str]:
    """Return a text for each op: a hash of all but the numbers that its rule takes as inputs, and these numbers."""
    names = graph.names
    return [_text(node, names) for node in graph.nodes]


def make_inputs(graph: Graph, told: Mapping[int, Sequence[str]]) -> None:
    """Let the numbers in which ranks differ be inputs from the next step on, if they differ in nothing else.

    Args:
        told: the `attributes` of each rank.
    """
    for node, texts in zip(graph.nodes, zip(*told.values(), strict=False), strict=False):
        if len({text.partition(" ")[0] for text in texts}) > 1:
            return  # what comes later may have other operands
        every = [text.split(" ")[1:] for text in texts]
        places = [i for i, numbers in enumerate(zip(*every, strict=True)) if len(set(numbers)) > 1]
        found = [_numbers(node)[i] for i in places]
        changing_numbers.make_inputs(node, found)
        for position in found:
            events.made_dynamic(node.op.name, node.op.arguments[position].name, node.site.describe())


def _numbers(node: Node) -> list[int]:
    """Return the positions of the numbers that may be inputs."""
    names = dynamic_arguments(node.op.recorded)
    given = enumerate(zip(node.op.arguments, node.key[1:], strict=False))
    return [i for i, (a, k) in given if a.name in names and changing_numbers.type_of_number(k) is not None]


def _text(node: Node, names: Mapping[Value, str]) -> str:
    positions = _numbers(node)
    others = [_plain(k) for i, k in enumerate(node.key[1:]) if i not in positions]
    types = [changing_numbers.type_of_number(node.key[i + 1]) for i in positions]
    given = [names[x] for x in operands(node) if type(x) is Value]
    what = f"{node.op.name} {node.values and [v and v.layout for v in node.values]} {given} {others} {types}"
    return " ".join([f"{zlib.crc32(what.encode()):x}", *[_number(node.key[i + 1]) for i in positions]])


def _plain(key: object) -> object:
    if type(key) is tuple:
        return [_plain(k) for k in key]
    return "%" if type(key) is Value else key if type(key) is not Number else "number"


def _number(key: object) -> str:
    return "input" if isinstance(key, type) else repr(key).replace(" ", "")
