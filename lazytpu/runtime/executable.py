"""A graph compiled for the device, and how it was used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lazytpu.diagnosis.events import Usage
from lazytpu.errors import LazyTPUError
from lazytpu.ir.graph import Graph
from lazytpu.runtime.client import Buffer


@dataclass(slots=True, weakref_slot=True)
class Executable:
    """A graph compiled for the device.

    Attributes:
        graph: what was compiled.
        compiled: jax's executable; called with (inputs, floats, ints, complexes).
        lower_s, compile_s: seconds spent in our rules and jax's tracing, and in XLA.
        smallest: index of the smallest result, for `lazytpu.wait` to hold on to.
        donated_bytes: size of the inputs whose memory the results take over.
        settings: the settings it was compiled with, see `compiler.settings`.
        load_s: seconds it took to load it from disk, where it was not compiled in this process.
        usage: how it was used.
        difference: setting or version that changed since the graph was kept on disk, where that is why it was compiled.
        interpreted: its ops run one by one, and there is no program.
        needs: bytes that it takes beside its inputs, where they are many; asked for before each run (`host.memory`).
        alone: its temporaries are so large that it waits until the program before it has given back its own.
        call: starts it, like ``compiled``.
        flat: starts it with all arrays one by one, which is less to unpack; None before `launch.flat_call` made it.
    """

    graph: Graph
    compiled: Any  # a jax.stages.Compiled, or what is called in place of one
    lower_s: float
    compile_s: float
    smallest: int
    donated_bytes: int = 0
    settings: dict[str, object] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    load_s: float = 0.0
    difference: str = ""
    interpreted: bool = False
    needs: int = 0
    alone: bool = False
    call: Callable[..., Sequence[Buffer]] = field(init=False)
    flat: Any = None

    def __post_init__(self) -> None:
        self.call = self.compiled

    def shorten_call(self) -> None:
        """Make ``call`` what ``compiled`` itself calls once it has run: one Python frame less in each run."""
        self.call = getattr(self.compiled, "_call", None) or self.compiled


def smallest_result(graph: Graph) -> int:
    """Return the index of the smallest result."""
    if graph.checked:
        return len(graph.outputs)  # the report
    sizes = [v.layout.nbytes for v in graph.outputs[: len(graph.outputs) - graph.concatenated]] or [0]
    return sizes.index(min(sizes))


def donated_bytes(graph: Graph) -> int:
    """Return the size of the inputs whose memory the results take over."""
    return sum(graph.inputs[i].layout.nbytes for i in graph.donated)


def failure(kind: type[LazyTPUError], verb: str, graph: Graph, error: Exception) -> LazyTPUError:
    """Return the error for a graph that XLA refused, with the op of the largest result: XLA does not name it."""
    sizes = {node: sum(v.layout.nbytes for v in node.values if v) for node in graph.nodes}
    node = max(sizes, key=lambda n: sizes[n])
    memory = "RESOURCE_EXHAUSTED" in str(error)
    return kind(
        f"XLA {verb} a graph of {len(graph.nodes)} ops: {error}",
        at=node.site.text,
        given=f"{node.op.name}, whose result {node.value.layout!r} is the largest, {sizes[node]:,} bytes",
        fix="use smaller batches, or free tensors before the step" if memory else "see lazytpu.stablehlo_text()",
    )
