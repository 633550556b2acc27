"""Looking inside a graph at the cut, before it runs: any value of it, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from lazytpu import observers
from lazytpu.debug import eager_mode
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.layout import Layout
from lazytpu.ir.tree import Node, Number, Value, trace
from lazytpu.runtime import executables, launch, transfers
from lazytpu.tracing import cutting


class Observed:
    """A graph about to run.

    Attributes:
        last: the node of its last op.
        outputs: the values it is to compute.
        buffers: what its inputs hold.
    """

    def __init__(self, outputs: tuple[Value, ...]) -> None:
        self.last, self.outputs = trace.cursor, outputs
        self.buffers = [buffer for _, buffer, _ in trace.inputs]
        self._floats, self._ints, self._complexes = list(trace.floats), list(trace.ints), list(trace.complexes)

    def graph(self, outputs: Sequence[Value]) -> Graph:
        """The part of it that computes ``outputs``; it donates nothing, so that it can be run again."""
        return graph_of(self.last, tuple(outputs))

    def number(self, x: Number) -> Any:
        """A number from Python."""
        kinds: dict[str, list[Any]] = {"f": self._floats, "i": self._ints, "c": self._complexes}
        return kinds[x.kind][x.index]

    def run(self, graph: Graph) -> list[torch.Tensor]:
        """The outputs of a graph of its values, on the CPU, row-major.  They share memory with the device's."""
        executable, _ = executables.executable_for(replace(graph, donated=()))
        inputs = [self.buffers[v.index] for v in graph.inputs]
        results = launch.run(executable, inputs, self._floats, self._ints, self._complexes)
        return [transfers.to_host(result) for result in results]

    def contents(self, values: Sequence[Value]) -> dict[Value, torch.Tensor]:
        """What values hold."""
        inputs = {v: transfers.to_host(self.buffers[v.index]) for v in values if v.node is None}
        made = [v for v in dict.fromkeys(values) if v.node is not None]
        return {**inputs, **dict(zip(made, self.run(self.graph(made)) if made else (), strict=True))}


@contextmanager
def observing(look: Callable[[Observed], None], reason: str) -> Iterator[None]:
    """Calls ``look`` with each graph that is cut inside; everything there is recorded, with its own line.

    What ``torch.compile`` has compiled runs as it was written.
    """
    eager_mode.forget_as_you_go(True)
    try:
        with uncompiled(), observed_now(look):
            yield
            cutting.cut(reason)
    finally:
        eager_mode.forget_as_you_go(False)


def uncompiled() -> AbstractContextManager[object]:
    """Functions of ``torch.compile`` run as they were written; nothing where nobody uses it."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def observed_now(look: Callable[[Observed], None]) -> Iterator[None]:
    """Calls ``look`` with each graph that is cut inside."""

    watch = _Look(look)
    observers.add(watch)
    try:
        yield
    finally:
        observers.remove(watch)


class _Look(observers.Observer):
    """Calls ``look`` with each graph that is cut."""

    def __init__(self, look: Callable[[Observed], None]) -> None:
        self.look = look

    def graph_cut(self, key: Any) -> None:
        self.look(Observed(key[0]))


def results_of(node: Node) -> list[Value]:
    """The results that torch defines."""
    return [v for v in node.values if v is not None]


def describe(layout: Layout, contents: torch.Tensor) -> str:
    """``f32[3,2] from -1.2 to 3.4``; ``f32[3,2] with 2 NaN, 1 inf, the rest from 0 to 1``."""
    if not contents.numel() or contents.dtype is torch.bool:
        return layout.describe()
    magnitudes = contents.abs() if contents.is_complex() else contents
    flat = magnitudes.reshape(-1).to(torch.float64)
    nans, infs = int(flat.isnan().sum()), int(flat.isinf().sum())
    finite = flat[flat.isfinite()]
    counts = ", ".join(f"{n} {name}" for n, name in ((nans, "NaN"), (infs, "inf")) if n)
    span = f"from {finite.min():.4g} to {finite.max():.4g}" if finite.numel() else ""
    if counts:
        return f"{layout.describe()} with {counts}" + (f", the rest {span}" if span else "")
    return f"{layout.describe()} {span}"
