"""Whether a graph is worth compiling: most that come once never come again, and compiling takes seconds.

On CPUs a graph is interpreted until it comes for the ``config.compile_after``-th time.  What decides is a count, never
a clock, so a program does the same in each run with the same disk cache.
"""

from __future__ import annotations

import torch

from lazytpu.config import config
from lazytpu.ir.graph import Graph
from lazytpu.observers import calls_of
from lazytpu.runtime import client
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.interpreter import interpreted
from lazytpu.runtime.least_recent import LeastRecent

_MOST_SEEN = 10_000
_seen = LeastRecent(_MOST_SEEN)  # the key of a graph: how often it was interpreted
_profilers = calls_of("region")


def interpreted_at_first(graph: Graph) -> Executable | None:
    """Return what interprets a graph; None where it is to be compiled."""
    if config.compile_after <= 1 or graph.mesh is not None or not _may_interpret(graph):
        return None
    times = _seen.find(graph.key) or 0
    if times + 1 >= config.compile_after:
        return None
    _seen.keep(graph.key, times + 1)
    return interpreted(graph)


def _may_interpret(graph: Graph) -> bool:
    """Return whether nobody asks for the program itself, or for the same digits with and without a disk cache."""
    asked_for = config.dump or config.verify or config.eager or config.lowerings != "auto" or _profilers
    deterministic = torch.are_deterministic_algorithms_enabled()
    return client.platform() == "cpu" and not (asked_for or deterministic or graph.checked)


def forget() -> None:
    """Forget how often graphs came (for tests)."""
    _seen.clear()
