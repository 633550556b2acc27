"""Whether a graph is worth compiling: most that come once never come again, and compiling takes seconds.

On CPUs a graph is interpreted until it comes for the ``config.compile_after``-th time, as a training step does.  One
that returns after more than eight other graphs were interpreted is one of many, as each length of a text is: compiling
all of them takes minutes, so such a return counts an eighth.  So may one of a very large graph, as of a text that was
written without a read: XLA took two minutes for thousands of ops that are interpreted in two seconds.  The iterations
of a loop count once, as they are compiled.  What decides is a count, never a clock, so a program does the same in each
run with the same disk cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from lazytpu.config import config
from lazytpu.ir.graph import Graph
from lazytpu.lowering.loops import ops_to_compile
from lazytpu.observers import calls_of
from lazytpu.runtime import background, client
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.interpreter import interpreted
from lazytpu.runtime.least_recent import LeastRecent

_MOST_SEEN = 10_000
_NEARBY = 8
_MOST_ELEMENTS = 1 << 30  # of a value: an expanded tensor takes no memory, but hours to go through one by one
_LARGE = 2000  # ops; the time to compile more grows with their square
_FAR_RETURNS = 8  # of a graph that count as one: compiling takes some ten times as long as interpreting


@dataclass(slots=True)
class _Seen:
    """What is known of a graph that was interpreted: how often it came, in eighths, when last, and ops to compile."""

    eighths: int
    last: int
    ops: int


_seen: LeastRecent[object, _Seen] = LeastRecent(_MOST_SEEN)  # the key of a graph: `_Seen`
_runs = [0]  # how many graphs were interpreted
_profilers = calls_of("region")


def interpreted_at_first(graph: Graph) -> Executable | None:
    """Return what interprets a graph, or its program where that is ready on the thread; None to compile it now."""
    if interpret_again(graph):
        return interpreted(graph)
    if config.compile_in_background and _may_interpret(graph):
        return background.compiled(graph) or interpreted(graph)
    return None


def interpret_again(graph: Graph) -> bool:
    """Return whether a graph is to be interpreted now, and count that it was."""
    if not _may_interpret(graph):
        return False
    seen = _seen.find(graph.key)
    if seen is None:
        ops = len(graph.nodes)
        _seen.keep(graph.key, seen := _Seen(0, _runs[0], ops if ops <= _LARGE else ops_to_compile(graph)))
    near = _runs[0] - seen.last <= _NEARBY
    larger = max(1.0, seen.ops / _LARGE)
    seen.eighths += max(1, int(_FAR_RETURNS / larger**2)) if near else 1
    if seen.eighths >= _FAR_RETURNS * config.compile_after and not background.is_compiling(graph):
        return False
    _runs[0] += 1
    seen.last = _runs[0]
    return True


def _may_interpret(graph: Graph) -> bool:
    """Return whether nobody asks for the program itself, or for the same digits with and without a disk cache."""
    asked_for = config.dump or config.verify or config.eager or config.lowerings != "auto" or _profilers
    deterministic = torch.are_deterministic_algorithms_enabled()
    always = config.compile_after <= 1 and not config.compile_in_background
    can = client.platform() == "cpu" and graph.mesh is None and not graph.checked and not graph.patterns
    return can and not (asked_for or deterministic or always) and not _is_huge(graph)


def _is_huge(graph: Graph) -> bool:
    """Return whether an op goes through more elements than torch's kernels do in seconds; XLA often need not."""
    return any(v is not None and prod(v.layout.size) > _MOST_ELEMENTS for node in graph.nodes for v in node.values)


def forget() -> None:
    """Forget how often graphs came (for tests)."""
    _seen.clear()
