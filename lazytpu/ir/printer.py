"""Print a graph as text, or as a drawing in Graphviz's language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lazytpu.dtypes import short_name
from lazytpu.ir.sharding import Sharding
from lazytpu.ir.tree import Node, Number, Value, operands

if TYPE_CHECKING:
    from lazytpu.ir.graph import Graph

_NUMBER_TYPE = {"f": "f64[]", "i": "i64[]", "c": "c128[]"}
_LETTER = {"f": "s", "i": "n", "c": "z"}
SITE_COLUMN = 64


def graph_text(graph: Graph, *, sites: bool = True) -> str:
    """Return the IR as text: one node a line, the user's line and module path at the right.

    Args:
        graph: what to print.
        sites: whether to print the user's lines and the comment at the head.
    """
    names = graph.names
    head = [f"{names[v]}: {v.layout.describe()}{_placed(v.sharding)}" for v in graph.inputs]
    head += [f"{number_name(n)}: {_NUMBER_TYPE[n.kind] if n.dtype != 'rng' else 'u64[2]'}" for n in graph.numbers]
    note = f"  # {_numbers_note(graph.numbers)}" if sites and graph.numbers else ""
    lines = [f"graph({', '.join(head)}) {{{note}"]
    for node in graph.nodes:
        line = f"  {node_text(node, names)}"
        if sites and node.site.text:
            line = f"{line:<{SITE_COLUMN}} # {node.site.text}"
        lines.append(line)
    lines.append(f"  return {', '.join(names[v] for v in graph.outputs)}")
    if graph.mesh is not None:
        lines += _mesh_lines(graph, names)
    if graph.donated:
        lines.append(f"  donate {', '.join(names[graph.inputs[d]] for d in graph.donated)}")
    if graph.checked:
        lines.append("  check bounds")
    for kind, start, stop in graph.uniform:
        lines.append(f"  equal %{_LETTER[kind]}{start} to %{_LETTER[kind]}{stop - 1}")
    if graph.concatenated:
        lines.append(f"  concatenate the last {graph.concatenated}")
    return "\n".join([*lines, "}"])


def _placed(sharding: Sharding | None) -> str:
    return "" if sharding is None else f" {sharding.describe()}"


def _mesh_lines(graph: Graph, names: dict[Value, str]) -> list[str]:
    """Return the meshes of a graph, and the shardings that its results are to have."""
    wanted = zip(graph.outputs, graph.shardings, strict=False)
    shown = ", ".join(f"{names[v]}{_placed(s)}" for v, s in wanted if s is not None)
    lines = [f"  on {mesh}" for mesh in graph.meshes]
    return [*lines, f"  lay out {shown}"] if shown else lines


def _numbers_note(numbers: Sequence[Number]) -> str:
    """Return ``%s0, %n0: scalar inputs``: what the names among the inputs that are no tensors mean."""
    scalars = [number_name(n) for n in numbers if n.dtype != "rng"]
    keys = [number_name(n) for n in numbers if n.dtype == "rng"]
    found = [(scalars, "scalar input"), (keys, "random key")]
    return "; ".join(
        f"{_listed(names)}: {f'a {what}' if len(names) == 1 else f'{what}s'}" for names, what in found if names
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]}, ..., {names[-1]}"


def node_text(node: Node, names: dict[Value, str]) -> str:
    """Return ``%0: f32[2,3] = aten.mul.Tensor(%p0, %s0)``."""
    results = ", ".join(f"{names[v]}: {v.layout.describe()}" for v in node.results)
    arguments = [_argument(x, names) for x in node.args]
    arguments += [f"{k}={_argument(x, names)}" for k, x in node.kwargs.items()]
    cast = f" as {', '.join(map(repr, node.natural))} then cast" if node.natural else ""
    return f"{results} = {node.op.name}({', '.join(arguments)}){cast}"


def number_name(number: Number) -> str:
    """Return ``%s0`` for a float, ``%n0`` for an int, ``%z0`` for a complex number."""
    return f"%{_LETTER[number.kind]}{number.index}"


def _argument(x: object, names: dict[Value, str]) -> str:
    if type(x) is Value:
        return names[x]
    if type(x) is Number:
        cast = f":{short_name(x.dtype)}" if isinstance(x.dtype, torch.dtype) else ""
        return number_name(x) + (":int" if x.dtype is int else ":bool" if x.dtype is bool else cast)
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(_argument(e, names) for e in x)}]"
    if isinstance(x, torch.dtype):
        return short_name(x)
    if isinstance(x, (torch.memory_format, torch.layout)):
        return str(x).removeprefix("torch.")
    return repr(x)


def graph_dot(graph: Graph) -> str:
    """Return the graph in Graphviz's language."""
    names = graph.names
    lines = ["digraph lazytpu {", '  node [shape=box, fontname="monospace"];']
    lines += [f'  "{names[v]}" [label="{names[v]}: {v.layout}", style=filled];' for v in graph.inputs]
    maker = {v: f"node{i}" for i, node in enumerate(graph.nodes) for v in node.results}
    for i, node in enumerate(graph.nodes):
        types = ", ".join(repr(v.layout) for v in node.results)
        place = node.site.text.replace('"', "'")
        lines.append(f'  node{i} [label="{node.op.name}\\n{types}\\n{place}"];')
        for x in operands(node):
            if type(x) is Value:
                lines.append(f'  "{maker.get(x, names.get(x))}" -> node{i};')
    lines += [f'  "{maker.get(v, names.get(v))}" -> output{i};' for i, v in enumerate(graph.outputs)]
    return "\n".join([*lines, "}"])
