"""Collectives of a compiled program: their kind, bytes and mesh axis, and the line and the reason they come from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import numpy as np

from lazytpu.debug.hlo import Computation, Instruction, Module
from lazytpu.debug.hlo_sources import Sources
from lazytpu.debug.hlo_types import arrays_of
from lazytpu.debug.links import Names
from lazytpu.ir.graph import SHARD, Graph
from lazytpu.ir.sharding import Mesh

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_OPCODES = {kind + end: kind for kind in _KINDS for end in ("", "-start")}
_CHANNEL = re.compile(r"channel_id=(\d+)")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[((?:'\w+'=\d+,?)*)\](?:<=\[[\d,]+\])? ?\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_SHAPED = re.compile(r"'(\w+)'=(\d+)")

Groups = frozenset[frozenset[int]]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ``collective-permute``, ...
        nbytes: of one run, of the whole that a device has before or after it: what an all-gather gives, what an
            all-reduce or a reduce-scatter takes.
        axis: the axes of the mesh that it goes over, joined by ``+``; ``?`` where it is none of their combinations.
        group: how many devices take part with each other.
        runs: how often it runs in a run of the program.
        ops: positions in the graph of the ops that it comes from.
        at: the line of the program, empty where XLA does not say.
        op: name of the op.
        reason: what asked for it: ``mark`` (of an intermediate result), ``sum`` (over a dimension that is split),
            ``input`` (one that is split is needed whole); empty where nobody has.
    """

    kind: str
    nbytes: int
    axis: str
    group: int
    runs: int = 1
    ops: tuple[int, ...] = ()
    at: str = ""
    op: str = ""
    reason: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes in a run of the program."""
        return self.nbytes * self.runs


def collectives_of(module: Module, mesh: Mesh, graph: Graph | None = None) -> list[Collective]:
    """Return the collectives of a program over a mesh, in the order of its text.

    Args:
        graph: what was compiled, for lines and reasons.
    """
    names, sources = None if graph is None else Names(graph), Sources(module)
    found = []
    seen: set[object] = set()
    for computation, instruction in module.instructions():
        kind = _OPCODES.get(instruction.opcode)
        if kind is None or not module.runs[computation.name]:
            continue
        channel = _CHANNEL.search(instruction.attributes)  # XLA writes down the parts of one that other work overlaps
        key = (kind, channel[1]) if channel else instruction.line
        if key in seen:
            continue
        seen.add(key)
        if kind == "all-reduce" and _is_scattered(instruction, computation):
            kind = "reduce-scatter"
        one = _collective(kind, instruction, computation, mesh, module.runs[computation.name])
        if graph is not None and names is not None:
            asked = one.kind not in ("all-reduce", "reduce-scatter") and sources.are_inputs(computation, instruction)
            one = _explained(one, instruction, graph, names, module, asked)
        found.append(one)
    return found


def _collective(kind: str, instruction: Instruction, computation: Computation, mesh: Mesh, runs: int) -> Collective:
    types = arrays_of(instruction.type)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        types = types[len(types) // 2 :] if instruction.opcode.startswith("all") else types[1:2]
    if kind == "reduce-scatter" and instruction.opcode.startswith("reduce-scatter"):
        types = arrays_of(instruction.inside) or [
            t for name in instruction.operands for t in arrays_of(computation.by_name[name].type)
        ]
    groups = groups_of(instruction.attributes, prod(mesh.shape))
    axis, size = axis_of(groups, mesh), max(map(len, groups), default=1)
    return Collective(kind, sum(t.nbytes for t in types), axis, size, runs)


def _is_scattered(instruction: Instruction, computation: Computation) -> bool:
    """Return whether only slices of an all-reduce's results are used: so XLA writes a reduce-scatter on TPUs."""
    taken = {instruction.name}
    users: list[Instruction] = []
    for i in computation.instructions:
        if taken.isdisjoint(i.operands):
            continue
        if i.opcode == "get-tuple-element":
            taken.add(i.name)
        else:
            users.append(i)
    sliced = [i for i in users if i.opcode == "dynamic-slice" and i.operands[0] in taken]
    return bool(users) and len(sliced) == len(users) and not instruction.root


def _explained(
    one: Collective, instruction: Instruction, graph: Graph, names: Names, module: Module, of_input: bool
) -> Collective:
    ops = names.ops(instruction.op_name) if instruction.op_name else []
    if not ops:
        ops = _near(instruction, names, module)
    nodes = [graph.nodes[i] for i in ops]
    reason = ""
    if any(node.op.name == SHARD for node in nodes):
        reason = "mark"
    elif one.kind in ("all-reduce", "reduce-scatter"):
        reason = "sum"
    elif of_input:
        reason = "input"
    at, op = (nodes[0].site.describe(), nodes[0].op.name) if nodes else ("", "")
    return replace(one, ops=tuple(ops), at=at, op=op, reason=reason)


def _near(instruction: Instruction, names: Names, module: Module) -> list[int]:
    """Return the ops of what the operands of an instruction without a name come from, through calls and tuples."""
    waiting = [(instruction, 0)]
    home = {i.line: c for c, i in module.instructions()}
    while waiting:
        at, depth = waiting.pop(0)
        found = names.ops(at.op_name) if at.op_name else []
        if found or depth > 8:
            return found
        computation = home[at.line]
        if at.opcode == "parameter":
            for caller, user in module.callers.get(computation.name, ()):
                position = int(at.inside) if at.inside.isdigit() else 0
                if position < len(user.operands):
                    waiting.append((caller.by_name[user.operands[position]], depth + 1))
        waiting += [(computation.by_name[n], depth + 1) for n in at.operands if n in computation.by_name]
        waiting += [(root, depth + 1) for n in at.called if (root := module.computations[n].root)]
    return []


def groups_of(attributes: str, count: int) -> Groups:
    """Return the groups of devices of a collective, by their position in the mesh.

    Example:
        >>> sorted(map(sorted, groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)))
        [[0, 2], [1, 3]]
    """
    if match := _NAMED.search(attributes):
        shape = {name: int(n) for name, n in _SHAPED.findall(match[1])}
        names = re.findall(r"'(\w+)'", match[2])
        return groups_over(tuple(shape.values()), [list(shape).index(n) for n in names])
    if match := _IOTA.search(attributes):
        ids = np.arange(prod(_numbers(match[2]))).reshape(_numbers(match[2]))
        ids = ids.transpose(_numbers(match[3])) if match[3] else ids
        return _sets(ids.reshape(_numbers(match[1])))
    if match := _PAIRS.search(attributes):
        return _linked([_numbers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", match[1])])
    match = _LISTED.search(attributes)
    listed = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", match[1])] if match else []
    found = frozenset(frozenset(group) for group in listed if group)
    return found or frozenset([frozenset(range(count))])


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _sets(rows: np.ndarray) -> Groups:
    return frozenset(frozenset(row) for row in rows.reshape(-1, rows.shape[-1]).tolist())


def _linked(pairs: Sequence[Sequence[int]]) -> Groups:
    """Return the sets of devices between which data goes."""
    groups: dict[int, set[int]] = {}
    for a, b in pairs:
        joined = groups.get(a, {a}) | groups.get(b, {b})
        groups |= dict.fromkeys(joined, joined)
    return frozenset(map(frozenset, groups.values()))


def groups_over(shape: Sequence[int], axes: Sequence[int]) -> Groups:
    """Return the groups of positions that differ along some axes of a mesh only."""
    ids = np.arange(prod(shape)).reshape(shape)
    others = [d for d in range(len(shape)) if d not in axes]
    return _sets(ids.transpose([*others, *axes]).reshape(-1, prod(shape[d] for d in axes)))


def axis_of(groups: Groups, mesh: Mesh) -> str:
    """Return the axes of a mesh that groups go over, joined by ``+``."""
    for chosen in _choices(mesh):
        over = groups_over(mesh.shape, chosen)
        if over == groups or (groups and all(any(g <= whole for whole in over) for g in groups)):
            return "+".join(mesh.axis_names[d] for d in chosen)
    return "?"


def _choices(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Yield the sets of axes longer than 1, the smallest first."""
    long = [d for d, n in enumerate(mesh.shape) if n > 1]
    for count in range(1, len(long) + 1):
        yield from combinations(long, count)
