"""Draw a graph as SVG with Graphviz, where it is installed."""

from __future__ import annotations

import shutil
import subprocess

# Graphviz takes minutes for more nodes, and nobody can read the drawing.
MAX_NODES = 1500
TIMEOUT_S = 20

# Above this many nodes the layout is less careful and arrows are straight, which is fifty times faster.
_CAREFUL = 60
_FAST = ("-Gsplines=line", "-Gnslimit=0.1", "-Gnslimit1=0.1", "-Gmclimit=0.01", "-Gsearchsize=1")


class NoDrawing(Exception):
    """There is no drawing; the message says why."""


def svg_of(dot: str, nodes: int) -> str:
    """Draw a graph given in Graphviz's language.

    Args:
        dot: the graph.
        nodes: how many nodes it has.

    Raises:
        NoDrawing: Graphviz is not installed or fails, or the graph is too large for it.
    """
    program = shutil.which("dot")
    if program is None:
        raise NoDrawing("Graphviz's program `dot` was not found; the report draws the graph without it")
    if nodes > MAX_NODES:
        raise NoDrawing(f"{nodes} ops are too many for one drawing; the report draws them folded by module")
    try:
        done = subprocess.run(
            [program, "-Tsvg", *(_FAST if nodes > _CAREFUL else ())],
            input=dot,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
    except (subprocess.SubprocessError, OSError) as error:
        raise NoDrawing(f"`dot` failed: {error}") from None
    return done.stdout.rstrip("\n")
