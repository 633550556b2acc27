"""Which results of a captured graph share memory: writing to one has to be seen in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lazytpu.tensors.layout import Geometry, geometry_of


@dataclass(frozen=True, slots=True)
class Group:
    """Where a result lies in memory that it shares with others.

    Attributes:
        number: of the group.
        base: the node whose value is the whole of that memory.
        geometry: of the result in it.
    """

    number: int
    base: torch.fx.Node
    geometry: Geometry


def memory_groups(module: torch.fx.GraphModule) -> dict[int, Group]:
    """Return positions of results that share memory with another, of those that the user is given.

    AOTAutograd sees to those that need gradients.
    """
    returned = _returned(module)
    by_memory: dict[int, list[int]] = {}
    for at, node in returned.items():
        by_memory.setdefault(_memory(node), []).append(at)
    arguments = {_memory(n) for n in module.graph.find_nodes(op="placeholder") if _tensor(n) is not None}
    groups: dict[int, Group] = {}
    for number, (memory, members) in enumerate(by_memory.items()):
        distinct = {returned[at] for at in members}
        base = _base(module, memory) if len(distinct) > 1 and memory not in arguments else None
        if base is not None:
            groups |= {at: Group(number, base, geometry_of(_tensor(returned[at]))) for at in members}
    return groups


def argument_views(module: torch.fx.GraphModule) -> dict[int, tuple[int, Geometry]]:
    """Return positions of results that are views of an argument, to its position and how they lie beside its start.

    AOTAutograd makes most of them itself, but leaves those of ops with several results, such as `split`, to us.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    arguments = {_memory(n): (i, n) for i, n in enumerate(placeholders) if _tensor(n) is not None}
    views = {}
    for at, node in _returned(module).items():
        position, argument = arguments.get(_memory(node), (-1, node))
        if argument is not node:
            size, stride, offset, dtype, bits = geometry_of(_tensor(node))
            if dtype == _tensor(argument).dtype and not bits | geometry_of(_tensor(argument))[-1]:
                views[at] = position, (size, stride, offset - _tensor(argument).storage_offset(), dtype, bits)
    return views


def _returned(module: torch.fx.GraphModule) -> dict[int, torch.fx.Node]:
    """Return positions of results to the nodes of the tensors that the user is given."""
    output = next(iter(module.graph.find_nodes(op="output")))
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    descriptions = output.meta.get("desc") or [None] * len(returned)
    return {
        at: node
        for at, (node, what) in enumerate(zip(returned, descriptions, strict=False))
        if _tensor(node) is not None and not type(what).__name__.startswith("Saved")
    }


def _tensor(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _memory(node: Any) -> int:
    return int(_tensor(node).untyped_storage()._cdata)


def _base(module: torch.fx.GraphModule, memory: int) -> torch.fx.Node | None:
    """Return the first node whose value is all of a memory."""
    for node in module.graph.nodes:
        tensor = _tensor(node)
        if tensor is not None and node.op == "call_function" and _memory(node) == memory:
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            return node if whole and not tensor.storage_offset() else None
    return None
