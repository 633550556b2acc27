"""Which results of a captured graph share memory: writing to one has to be seen in the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lazytpu.ir.types import is_dense
from lazytpu.tensors.layout import Geometry, geometry_of


@dataclass(frozen=True, slots=True)
class Group:
    """Where a result lies in memory that it shares with others.

    Attributes:
        number: of the group.
        base: the node whose value is the whole of that memory.
        geometry: of the result in it; None for the one that is the base.
        is_view: autograd knows it as a view of the base, which it does not if it was detached.
    """

    number: int
    base: torch.fx.Node
    geometry: Geometry | None
    is_view: bool


def memory_groups(module: torch.fx.GraphModule, gradients: bool = False) -> dict[int, Group]:
    """Return positions of results that share memory with another, or are a part of it, of those the user is given.

    AOTAutograd sees to those that need gradients.

    Args:
        gradients: the results are gradients, which need no memory around them.
    """
    returned = _returned(module)
    by_memory: dict[int, list[int]] = {}
    for at, node in returned.items():
        by_memory.setdefault(_memory(node), []).append(at)
    arguments = {_memory(n) for n in module.graph.find_nodes(op="placeholder") if _tensor(n) is not None}
    groups: dict[int, Group] = {}
    for number, (memory, members) in enumerate(by_memory.items()):
        alone = len(members) == 1 and (gradients or _is_whole(_tensor(returned[members[0]])))
        base = None if alone or memory in arguments else _base(module, memory)
        if base is not None:
            whole = next((at for at in members if returned[at] is base), None)
            for at in members:
                geometry = None if at == whole else geometry_of(_tensor(returned[at]))
                groups[at] = Group(number, base, geometry, _is_view(returned[at], base))
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
            whole = _tensor(argument)
            size, stride, offset, dtype, bits = geometry_of(_tensor(node))
            start, rest = divmod(whole.storage_offset() * whole.itemsize, dtype.itemsize)
            if not (bits | geometry_of(whole)[-1] or rest):
                views[at] = position, (size, stride, offset - start, dtype, bits)
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


def _is_view(node: torch.fx.Node, base: torch.fx.Node) -> bool:
    """Return whether view ops other than `detach` led from the base to a node, which is another one."""
    if node is base:  # returned once more, as AOTAutograd drops some that detach
        return False
    while node is not base and node.target is not torch.ops.aten.detach.default and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node is base


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
            return node if _is_whole(tensor) else None
    return None


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all of its memory."""
    size, stride = tuple(tensor.shape), tensor.stride()
    whole = tensor.nbytes == tensor.untyped_storage().nbytes() and not tensor.storage_offset()
    return whole and is_dense(size, stride)
