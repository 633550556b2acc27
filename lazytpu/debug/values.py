"""Look at the values of a graph, on the CPU, when it is cut and before it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from lazytpu import observers
from lazytpu.debug import eager_mode
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.tree import Node, Number, Value, trace
from lazytpu.ir.types import TensorType
from lazytpu.runtime import executables, launch, meshes, transfers
from lazytpu.tracing import cutting


class PendingGraph:
    """A graph about to run.

    Attributes:
        last: the node of its last op.
        outputs: the values that it will compute.
        buffers: the contents of its inputs.
    """

    def __init__(self, outputs: tuple[Value, ...]) -> None:
        self.last, self.outputs = trace.cursor, outputs
        self.buffers = [buffer for _, buffer, _ in trace.inputs]
        self._scalars = list(trace.floats), list(trace.ints), list(trace.complexes)

    def graph(self, outputs: Sequence[Value]) -> Graph:
        """Return the part that computes ``outputs``; it donates nothing, so that it can run again."""
        return graph_of(self.last, tuple(outputs))

    def scalar(self, x: Number) -> float | complex:
        """Return the value of a scalar input."""
        return self._scalars["fic".index(x.kind)][x.index]

    def run(self, graph: Graph) -> list[torch.Tensor]:
        """Compute the outputs of a graph of its values, on the CPU, row-major.  They share the device's memory."""
        executable, _ = executables.executable_for(replace(graph, donated=()))
        inputs = [self.buffers[v.index] for v in graph.inputs]
        results = launch.run(executable, meshes.placed(graph, inputs), *self._scalars)
        return [transfers.to_host(result) for result in results]

    def contents(self, values: Sequence[Value]) -> dict[Value, torch.Tensor]:
        """Return the contents of values."""
        inputs = {v: transfers.to_host(self.buffers[v.index]) for v in values if v.node is None}
        made = [v for v in dict.fromkeys(values) if v.node is not None]
        return {**inputs, **dict(zip(made, self.run(self.graph(made)) if made else (), strict=True))}


@contextmanager
def observing(look: Callable[[PendingGraph], None], reason: str) -> Iterator[None]:
    """Call ``look`` with each graph that is cut inside; every op there is recorded anew, with its own line.

    Functions of ``torch.compile`` run uncompiled.
    """
    eager_mode.forget_as_you_go(True)
    try:
        with uncompiled(), observed_now(look):
            yield
            cutting.cut(reason)
    finally:
        eager_mode.forget_as_you_go(False)


def uncompiled() -> AbstractContextManager[object]:
    """Run functions of ``torch.compile`` uncompiled; does nothing where nobody has imported Dynamo."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def observed_now(look: Callable[[PendingGraph], None]) -> Iterator[None]:
    """Call ``look`` with each graph that is cut inside."""
    watch = _Look(look)
    observers.add(watch)
    try:
        yield
    finally:
        observers.remove(watch)


class _Look(observers.Observer):
    """Calls ``look`` with each graph that is cut."""

    def __init__(self, look: Callable[[PendingGraph], None]) -> None:
        self.look = look

    def graph_cut(self, key: tuple[tuple[Value, ...], ...]) -> None:
        self.look(PendingGraph(key[0]))


def results_of(node: Node) -> list[Value]:
    """Return the results that torch defines."""
    return [v for v in node.values if v is not None]


def describe(layout: TensorType, contents: torch.Tensor) -> str:
    """Return ``f32[3,2] from -1.2 to 3.4``, or ``f32[3,2] with 2 NaN, 1 inf, the rest from 0 to 1``."""
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
