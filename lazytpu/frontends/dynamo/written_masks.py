"""Masks that are written out in a function, as in ``x[[True, False]]``: how many are true is known before it runs."""

from __future__ import annotations

import operator

import torch

_INDEXING = (operator.getitem, operator.setitem)


def as_places(module: torch.fx.GraphModule) -> None:
    """Put where they are true in place of lists of booleans that index, so that sizes do not depend on values."""
    made = {n for n in module.graph.find_nodes(op="call_function", target=torch.tensor) if _is_plain_mask(n)}
    for target in _INDEXING:
        for node in module.graph.find_nodes(op="call_function", target=target):
            operand, index, *rest = node.args
            parts = index if isinstance(index, (tuple, list)) and not _is_mask(index) else (index,)
            found = [
                _places(part.args[0] if isinstance(part, torch.fx.Node) and part in made else part) for part in parts
            ]
            if any(places is not None for places in found):
                new = [e for part, places in zip(parts, found, strict=True) for e in places or (part,)]
                node.args = (operand, tuple(new), *rest)


def _is_plain_mask(node: torch.fx.Node) -> bool:
    return len(node.args) == 1 and not node.kwargs and _is_mask(node.args[0])


def _is_mask(x: object) -> bool:
    if not isinstance(x, list) or not x:
        return False
    return all(type(e) is bool for e in x) or all(_is_mask(e) for e in x)


def _places(part: object) -> list[list[int]] | None:
    """Return the positions along each dimension of a mask, None for any other part of an index."""
    if not _is_mask(part):
        return None
    return [i.tolist() for i in torch.tensor(part, device="cpu").nonzero().unbind(1)]
