"""Writes IR and HLO of every compiled graph to a folder: ``lazytpu.config.dump``."""

from __future__ import annotations

from pathlib import Path

from lazytpu import runtime
from lazytpu.config import config
from lazytpu.debug.inspect import hlo_of, optimized_hlo_of, stablehlo_of
from lazytpu.events import Compilation, one_line
from lazytpu.ir.printer import graph_dot, graph_text


def dump(event: Compilation) -> None:
    """Writes one compiled graph, if a folder is configured.

    The files of graph 1 are ``graph-001-<hash>/`` ``ir.txt``, ``ir.dot``, ``stablehlo.mlir``, ``hlo.txt``,
    ``hlo-optimized.txt`` and ``cause.txt``; the names are the same in every run of the same program.
    """
    if not config.dump:
        return
    folder = Path(config.dump) / f"graph-{event.number:03d}-{event.graph.key[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    lowered = runtime.lower(event.graph)  # again: kept, it would hold a megabyte for every graph
    files = {
        "ir.txt": graph_text(event.graph),
        "ir.dot": graph_dot(event.graph),
        "stablehlo.mlir": stablehlo_of(lowered),
        "hlo.txt": hlo_of(lowered),
        "hlo-optimized.txt": optimized_hlo_of(event.executable.compiled),
        "cause.txt": one_line(event),
    }
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
