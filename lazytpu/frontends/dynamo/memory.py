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

    AOTAutograd sees to results that share memory with arguments, and to those that need gradients.
    """
    output = next(iter(module.graph.find_nodes(op="output")))
    returned = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    descriptions = output.meta.get("desc") or [None] * len(returned)
    by_memory: dict[int, list[int]] = {}
    for at, (node, what) in enumerate(zip(returned, descriptions, strict=False)):
        if _tensor(node) is not None and not type(what).__name__.startswith("Saved"):
            by_memory.setdefault(_memory(node), []).append(at)
    arguments = {_memory(n) for n in module.graph.find_nodes(op="placeholder") if _tensor(n) is not None}
    groups: dict[int, Group] = {}
    for number, (memory, members) in enumerate(by_memory.items()):
        distinct = {returned[at] for at in members}
        base = _base(module, memory) if len(distinct) > 1 and memory not in arguments else None
        if base is not None:
            groups |= {at: Group(number, base, geometry_of(_tensor(returned[at]))) for at in members}
    return groups


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
