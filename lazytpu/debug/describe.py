"""Describe a compiled graph as tables of plain data: ops with types, lines and costs, memory, HLO with its ops."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from lazytpu.debug.cost import flops_of
from lazytpu.debug.folder import JsonObject
from lazytpu.debug.hlo import Module
from lazytpu.debug.links import Origin
from lazytpu.debug.on_mesh import bytes_on_each
from lazytpu.ir.graph import Graph
from lazytpu.ir.printer import node_text, number_name
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.lowering.registry import target_platform


def graph_table(graph: Graph) -> JsonObject:
    """Return inputs, scalar inputs, ops and outputs, and the call stacks of the ops' lines."""
    names = graph.names
    donated = {graph.inputs[i] for i in graph.donated}
    stacks: dict[tuple[tuple[str, int], ...], int] = {}
    ops = [{**_op(node, names), "stack": stacks.setdefault(_callers(node), len(stacks))} for node in graph.nodes]
    return {
        "inputs": [{**_value(v, names), "donated": v in donated} for v in graph.inputs],
        "numbers": [{"name": number_name(n), "kind": n.kind} for n in graph.numbers],
        "ops": ops,
        "stacks": [[list(line) for line in stack] for stack in stacks],
        "outputs": [names[v] for v in graph.outputs],
    }


def is_of_program(file: str) -> bool:
    """Return whether a file belongs to the program that ran, and not to an installed package."""
    return f"{os.sep}site-packages{os.sep}" not in file


def _callers(node: Node) -> tuple[tuple[str, int], ...]:
    """Return the lines that led to the line of an op, the innermost first."""
    stack = node.site.stack
    return tuple([line for line in dict.fromkeys(stack[1:]) if is_of_program(line[0]) and line != stack[0]])


def _op(node: Node, names: dict[Value, str]) -> JsonObject:
    results = [_value(v, names) for v in node.values if v is not None]
    used = list(dict.fromkeys(operands(node)))
    site = node.site
    return {
        "name": results[0]["name"] if results else "",
        "op": str(node.op.name),
        "text": node_text(node, names),
        "results": results,
        "operands": [number_name(x) if isinstance(x, Number) else names[x] for x in used],
        "file": site.file,
        "line": site.line,
        "module": site.module,
        "backward": site.backward,
        "flops": flops_of(node),
        "bytes": _bytes(node, used),
    }


def _value(value: Value, names: dict[Value, str]) -> JsonObject:
    return {"name": names[value], "type": value.layout.describe(), "bytes": value.layout.nbytes}


def _bytes(node: Node, used: Sequence[Value | Number]) -> int:
    """Return the bytes that the op by itself would read and write; a view does neither."""
    if getattr(node.op.recorded, "is_view", False):  # loops and conditions are of another class
        return 0
    return sum(v.layout.nbytes for v in (*used, *node.values) if type(v) is Value)


def cost_table(ops: Sequence[JsonObject], xla: Mapping[str, float]) -> JsonObject:
    """Sum up costs: in all, by op and by module.

    Args:
        ops: of `graph_table`.
        xla: ``cost_analysis`` of the executable.
    """
    by_op: dict[str, Counter[str]] = {}
    by_module: dict[str, Counter[str]] = {}
    for op in ops:
        module = op["module"] + (" (backward)" if op["backward"] else "")
        for table, key in ((by_op, op["op"]), (by_module, module)):
            table.setdefault(key, Counter()).update(count=1, flops=op["flops"], bytes=op["bytes"])
    names = {"flops": "flops", "transcendentals": "transcendentals", "bytes accessed": "bytes"}
    return {
        "flops": sum(op["flops"] for op in ops),
        "bytes": sum(op["bytes"] for op in ops),
        "xla": {ours: xla[theirs] for theirs, ours in names.items() if theirs in xla},
        "by_op": [{"op": key, **row} for key, row in _ranked(by_op)],
        "by_module": [{"module": key, **row} for key, row in _ranked(by_module)],
    }


def _ranked(table: dict[str, Counter[str]]) -> list[tuple[str, Counter[str]]]:
    return sorted(table.items(), key=lambda item: (-item[1]["flops"], -item[1]["bytes"], item[0]))


def instruction_table(module: Module, found: Mapping[int, Origin]) -> JsonObject:
    """Return the instructions of a module with their origin, and which instruction applies which computation."""
    rows = []
    for computation, instruction in module.instructions():
        origin = found[instruction.line]
        row: JsonObject = {"line": instruction.line, "name": instruction.name, "opcode": instruction.opcode}
        row |= {"computation": computation.name, "how": origin.how, "ops": origin.ops}
        rows.append(row | ({"inputs": origin.inputs} if origin.inputs else {}))
    callers = module.callers
    return {
        "computations": [
            {"name": c.name, "line": c.line, "called_by": [i.line for _, i in callers.get(c.name, ())]}
            for c in module.computations.values()
        ],
        "instructions": rows,
    }


def memory_table(graph: Graph, stats: object | None) -> JsonObject:
    """Return the bytes that an executable needs on each device.

    Args:
        graph: what was compiled.
        stats: jax's ``memory_analysis``, None where the platform has none.
    """
    names = graph.names
    donated = [names[graph.inputs[i]] for i in graph.donated]
    table = {} if stats is None else {ours: int(getattr(stats, theirs, 0)) for ours, theirs in _MEMORY.items()}
    if table and target_platform() == "cpu":  # XLA's peak leaves the temporaries out there
        held = table["arguments_bytes"] + table["outputs_bytes"] - table["aliased_bytes"]
        table["peak_bytes"] = held + table["temporaries_bytes"]
    return {**table, "donated": donated, "donated_bytes": sum(bytes_on_each(graph.inputs[i]) for i in graph.donated)}


_MEMORY = {
    "arguments_bytes": "argument_size_in_bytes",
    "outputs_bytes": "output_size_in_bytes",
    "aliased_bytes": "alias_size_in_bytes",
    "temporaries_bytes": "temp_size_in_bytes",
    "peak_bytes": "peak_memory_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
}


def types_text(graph: Graph) -> str:
    """Return one line for each value: its name, type and bytes."""
    rows = [(name, value.layout.describe(), f"{value.layout.nbytes:,} bytes") for value, name in graph.names.items()]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def sites_text(ops: Sequence[JsonObject]) -> str:
    """Return each line of the program with the results of the ops recorded there."""
    places: dict[str, list[str]] = {}
    for op in ops:
        words = [f"{op['file'] or '?'}:{op['line']}", op["module"], "(backward)" if op["backward"] else ""]
        places.setdefault("  ".join(filter(None, words)), []).append(op["name"])
    return "\n".join(f"{place}\n    {' '.join(names)}" for place, names in places.items())
