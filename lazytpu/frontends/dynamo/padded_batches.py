"""Batches of any size through programs for a few sizes: rows are added, and taken off the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazytpu.errors import UnsupportedOpError
from lazytpu.frontends.dynamo.batch_rows import prove_rows, rows_of
from lazytpu.frontends.dynamo.compiled import CompiledGraph

Sizes = bool | Sequence[int]


def sizes_of(option: object) -> Sizes:
    """Return the option ``pad`` of the backend: True for the powers of two, or the sizes themselves.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(option, bool):
        return option
    if isinstance(option, (list, tuple)) and option and all(type(n) is int and n > 1 for n in option):
        return sorted(option)
    raise TypeError(f'options={{"pad": ...}} is True or a list of sizes above 1, not {option!r}')


def padded_size(n: int, sizes: Sizes) -> int:
    """Return the size that a batch of ``n`` is padded to: ``n`` itself where it is larger than all."""
    if isinstance(sizes, bool):
        return 1 << (n - 1).bit_length()
    return next((size for size in sizes if size >= n), n)


class PaddedGraph:
    """A captured graph called with larger batches: the last row is repeated, and its results are cut off again."""

    def __init__(self, graph: CompiledGraph, sizes: Sizes) -> None:
        """Take a graph.

        Raises:
            UnsupportedOpError: it is one of training, or the rows of its batch are not known to be independent.
        """
        if graph.kind != "inference":
            raise UnsupportedOpError(
                'options={"pad": ...} is for calls that need no gradient: a loss would count the rows that were added',
                fix="call it under torch.no_grad(), or pad the batches yourself and mask the loss",
            )
        prove_rows(graph.module)
        self.graph, self.sizes = graph, sizes
        self._boxed_call = True
        given = graph.module.graph.find_nodes(op="placeholder")
        (output,) = graph.module.graph.find_nodes(op="output")
        self._rows = [rows_of(n.meta.get("val")) for n in given]
        self._batch = [i for i, n in enumerate(given) if isinstance(n.meta.get("val"), torch.SymInt)]
        self._results = [rows_of(n.meta.get("val")) if isinstance(n, torch.fx.Node) else None for n in output.args[0]]

    def __call__(self, args: list[Any]) -> list[Any]:
        n = next((x.shape[at] for x, at in zip(args, self._rows, strict=True) if at is not None), 0)
        size = padded_size(n, self.sizes) if n else 0
        if size == n:
            return self.graph(args)
        given = [x if at is None else _padded(x, at, size) for x, at in zip(args, self._rows, strict=True)]
        for position in self._batch:
            given[position] = size
        args.clear()
        results = self.graph(given)
        return [
            x if at is None else x.narrow(at, 0, x.shape[at] // size * n)
            for x, at in zip(results, self._results, strict=True)
        ]


def _padded(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    last = x.narrow(dim, x.shape[dim] - 1, 1)
    sizes = list(x.shape)
    sizes[dim] = size - x.shape[dim]
    return torch.cat([x, last.expand(sizes)], dim)
