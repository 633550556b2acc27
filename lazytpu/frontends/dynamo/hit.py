"""The call of a captured graph that only starts its executable and wraps the results: nearly every call.

All in one function, as its frames and look-ups are most of what a call costs above jax's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazytpu.config import config
from lazytpu.frontends.dynamo.captured_program import results_of
from lazytpu.frontends.dynamo.compiled import CompiledGraph
from lazytpu.ir.tree import trace
from lazytpu.observe.metrics import count_hit
from lazytpu.runtime import executables, launch, meshes
from lazytpu.tracing import cutting, record


def quick(graph: CompiledGraph) -> Callable[..., list[object]]:
    """Return a graph as a function of its arguments that looks no further where the latest call can be repeated."""
    lock, kept, on_meshes = record.lock, executables.executables, meshes.used

    def call(*args: Any) -> list[Any]:
        try:
            cells = [x._s for x in args]
        except AttributeError:  # numbers, CPU tensors, device tensors that C++ made
            return graph([*args])
        known = graph.shortcut
        if (
            known is None
            or [c.layout for c in cells] != known.layouts
            or config.matmul_precision != known.precision
            or config.lowerings != known.lowerings
            or config.check_bounds
            or on_meshes  # a buffer may lie on all devices of one
        ):
            return graph([*args])
        executable = known.executable()
        outputs: Any = None
        with lock:
            pending = trace.inputs or trace.pending  # else nothing belongs to this step
            if executable is not None and not (pending and trace.step in [c.step for c in cells]):
                if kept.newest is not executable:
                    executables.used(executable)
                try:
                    outputs = executable.flat(*[c.buffer for c in cells], *known.scalars)
                except TypeError:  # jax takes no None, which stands for contents elsewhere
                    pass
                except Exception as error:
                    raise launch.explained(executable, error) from error
        if outputs is None:
            return graph([*args])
        known.usage.runs += 1
        count_hit()
        cutting.remember(outputs[known.smallest])
        return results_of(known.fresh, known.others, outputs, args)

    return call


def boxed(graph: CompiledGraph) -> Callable[[list[object]], list[object]]:
    """Return `quick` as AOTAutograd calls it: with a list of arguments."""
    call = quick(graph)

    def call_boxed(args: list[object]) -> list[object]:
        return call(*args)

    call_boxed._boxed_call = True  # type: ignore[attr-defined]  # torch asks for it
    return call_boxed
