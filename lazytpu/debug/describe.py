"""A compiled graph as tables of plain data: ops with types, lines and costs, memory, links from text to ops."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from lazytpu.debug.cost import Costs, Visit, visits
from lazytpu.debug.hlo import Module
from lazytpu.debug.links import Names, Origin
from lazytpu.ir.graph import Graph
from lazytpu.ir.printer import node_text, number_name
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.runtime.executable import donated_bytes

Table = dict[str, Any]


def graph_table(graph: Graph, flops: Counter[int]) -> Table:
    """Inputs, numbers, ops and outputs, and the lines from which the lines of the ops were called.

    Args:
        graph: what was compiled.
        flops: operations of each op, by position.
    """
    names = graph.names
    donated = {graph.inputs[i] for i in graph.donated}
    inputs = [{**_value(v, names), "donated": v in donated} for v in graph.inputs]
    stacks: dict[Any, int] = {}
    ops = [_op(node, names, flops[i]) for i, node in enumerate(graph.nodes)]
    for op, node in zip(ops, graph.nodes, strict=True):
        op["stack"] = stacks.setdefault(_callers(node), len(stacks))
    return {
        "inputs": inputs,
        "numbers": [{"name": number_name(n), "kind": n.kind} for n in graph.numbers],
        "ops": ops,
        "stacks": [[list(line) for line in stack] for stack in stacks],
        "outputs": [names[v] for v in graph.outputs],
    }


def is_of_program(file: str) -> bool:
    """Whether a file is of the program that ran, and not of a package that it uses, such as one that started it."""
    return f"{os.sep}site-packages{os.sep}" not in file


def _callers(node: Node) -> tuple[tuple[str, int], ...]:
    """The lines that led to the line of an op, the innermost first."""
    stack: tuple[tuple[str, int], ...] = node.site.stack if node.site is not None else ()
    return tuple([line for line in dict.fromkeys(stack[1:]) if is_of_program(line[0]) and line != stack[0]])


def _op(node: Node, names: dict[Value, str], flops: int) -> Table:
    results = [_value(v, names) for v in node.values if v is not None]
    used = list(dict.fromkeys(x for x in operands(node)))
    site = node.site
    return {
        "name": results[0]["name"] if results else "",
        "op": str(node.op.name),
        "text": node_text(node, names),
        "results": results,
        "operands": [number_name(x) if type(x) is Number else names[x] for x in used],
        "file": site.file if site else "",
        "line": site.line if site else 0,
        "module": site.module if site else "",
        "backward": site.backward if site else False,
        "flops": flops,
        "bytes": _bytes(node, used),
    }


def _value(value: Value, names: dict[Value, str]) -> Table:
    return {"name": names[value], "type": value.layout.describe(), "bytes": value.layout.nbytes}


def _bytes(node: Node, used: list[Any]) -> int:
    """What the op by itself would read and write; a view does neither."""
    if getattr(node.op.recorded, "is_view", False):  # loops and conditions are of another class
        return 0
    return sum(v.layout.nbytes for v in [*used, *node.values] if type(v) is Value)


def flops_of(module: Module, names: Names, found: dict[int, Origin]) -> Counter[int]:
    """Operations of each op of the IR, from the HLO before optimisation."""
    costs, total = Costs(module), Counter[int]()

    def op_of(visit: Visit) -> int | None:
        ops = names.ops(visit.instruction.op_name)
        if ops:
            return ops[0]
        if visit.caller is not None:
            return op_of(visit.caller)
        ops = found[visit.instruction.line].ops
        return ops[0] if ops else None

    for visit in visits(module):
        op = op_of(visit)
        if op is not None:
            total[op] += visit.times * costs.flops(visit.instruction)
    return total


def cost_table(ops: list[Table], optimized: Table | None, xla: dict[str, float]) -> Table:
    """Sums, in all and by op and module.

    Args:
        ops: of `graph_table`.
        optimized: of `instruction_table`, for what the executable reads and writes after fusion.
        xla: ``cost_analysis`` of the executable.
    """
    by_op: dict[str, Counter[str]] = {}
    by_module: dict[str, Counter[str]] = {}
    for op in ops:
        module = op["module"] + (" (backward)" if op["backward"] else "")
        for table, key in ((by_op, op["op"]), (by_module, module)):
            table.setdefault(key, Counter()).update(count=1, flops=op["flops"], bytes=op["bytes"])
    made = {"flops": sum(op["flops"] for op in ops), "bytes": sum(op["bytes"] for op in ops)}
    if optimized is not None:
        made["bytes_fused"] = sum(i["bytes"] for i in optimized["instructions"])
    names = {"flops": "flops", "transcendentals": "transcendentals", "bytes accessed": "bytes"}
    return {
        **made,
        "xla": {ours: xla[theirs] for theirs, ours in names.items() if theirs in xla},
        "by_op": [{"op": key, **row} for key, row in _ranked(by_op)],
        "by_module": [{"module": key, **row} for key, row in _ranked(by_module)],
    }


def _ranked(table: dict[str, Counter[str]]) -> list[tuple[str, Counter[str]]]:
    return sorted(table.items(), key=lambda item: (-item[1]["flops"], -item[1]["bytes"], item[0]))


def instruction_table(module: Module, found: dict[int, Origin]) -> Table:
    """Instructions with their origin and cost, and which instruction applies which computation."""
    costs = Costs(module)
    times: Counter[int] = Counter()
    flops: Counter[int] = Counter()
    moved: Counter[int] = Counter()
    for visit in visits(module):
        line = visit.instruction.line
        times[line] += visit.times
        amount = visit.times * costs.flops(visit.instruction)
        flops[line] += amount
        above = visit.caller
        while amount and above is not None and above.instruction.opcode == "fusion":
            flops[above.instruction.line] += amount
            above = above.caller
        if not visit.fused:
            moved[line] += visit.times * costs.bytes(visit.instruction)
    rows = []
    for computation, instruction in module.instructions():
        origin, line = found[instruction.line], instruction.line
        row: Table = {"line": line, "name": instruction.name, "opcode": instruction.opcode}
        row |= {"computation": computation.name, "how": origin.how, "ops": origin.ops}
        row |= {"inputs": origin.inputs} if origin.inputs else {}
        rows.append({**row, "times": times[line], "flops": flops[line], "bytes": moved[line]})
    callers = module.callers
    return {
        "computations": [
            {"name": c.name, "line": c.line, "called_by": [i.line for _, i in callers.get(c.name, ())]}
            for c in module.computations.values()
        ],
        "instructions": rows,
    }


def memory_table(graph: Graph, stats: Any) -> Table:
    """Bytes of the executable.

    Args:
        graph: what was compiled.
        stats: jax's ``memory_analysis``, None where the platform has none.
    """
    names = graph.names
    donated = [names[graph.inputs[i]] for i in graph.donated]
    table: Table = {} if stats is None else {ours: int(getattr(stats, f, 0)) for ours, f in _MEMORY.items()}
    return {**table, "donated": donated, "donated_bytes": donated_bytes(graph)}


_MEMORY = {
    "arguments_bytes": "argument_size_in_bytes",
    "outputs_bytes": "output_size_in_bytes",
    "aliased_bytes": "alias_size_in_bytes",
    "temporaries_bytes": "temp_size_in_bytes",
    "peak_bytes": "peak_memory_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
}


def types_text(graph: Graph) -> str:
    """One line a value: its name, type and bytes."""
    rows = [(name, value.layout.describe(), f"{value.layout.nbytes:,} bytes") for value, name in graph.names.items()]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def sites_text(ops: list[Table]) -> str:
    """One line a place in the program: the results of the ops recorded there."""
    places: dict[str, list[str]] = {}
    for op in ops:
        words = [f"{op['file'] or '?'}:{op['line']}", op["module"], "(backward)" if op["backward"] else ""]
        places.setdefault("  ".join(filter(None, words)), []).append(op["name"])
    return "\n".join(f"{place}\n    {' '.join(names)}" for place, names in places.items())
