"""``inspect``: show the graphs of a dump as tables in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lazytpu.cli import tables
from lazytpu.cli.run_package import is_package, show_package
from lazytpu.debug.compare import text_of, unified
from lazytpu.debug.folder import Dump, DumpedGraph, NotADump, open_dump, open_graph, steps_of
from lazytpu.debug.passes import passes_of


def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="DIR|FILE", help="A dump, a graph of it, a file of a graph, a file of steps, or a package."
        ),
    ],
    graph: Annotated[int | None, typer.Option("-g", "--graph", metavar="N", help="Only graph N, in full.")] = None,
    diff: Annotated[
        tuple[int, int] | None, typer.Option(metavar="A B", help="Show how graph B differs from graph A.")
    ] = None,
    passes: Annotated[
        bool, typer.Option("--passes", help="Show XLA's passes, with instructions before and after (`run --passes`).")
    ] = False,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Number of rows of the cost tables.")] = 15,
) -> None:
    """Show the graphs of a dump (`run --dump DIR`), their costs, and how two of them differ.

    Without options, a dump is listed, a graph is shown in full, a file of steps (run --metrics FILE) is shown as a
    table, and any other file is printed with colors.
    """
    try:
        _inspect(path, graph, diff, passes, top)
    except NotADump as error:
        raise typer.BadParameter(str(error), param_hint="DIR|FILE") from None


def _inspect(path: Path, number: int | None, pair: tuple[int, int] | None, passes: bool, top: int) -> None:
    if path.is_file() and is_package(path):
        show_package(path)
        return
    if path.is_file():
        steps = steps_of(path)
        if steps:
            tables.show_steps(path, steps)
        else:
            tables.show_file(path)
        return
    one = open_graph(path)
    dump = open_dump(path.parent if one is not None else path)
    chosen = dump.graph(number) if number is not None else one
    if pair is not None:
        _show_diff(dump, *pair)
    elif passes:
        for found in dump.graphs if chosen is None else [chosen]:
            _show_passes(dump, found)
    elif chosen is not None:
        tables.show_graph(dump, chosen, top)
    else:
        tables.show_dump(dump)


def _show_diff(dump: Dump, first: int, second: int) -> None:
    old, new = dump.graph(first), dump.graph(second)
    text = unified(text_of(old.name, old.text("ir.txt")), text_of(new.name, new.text("ir.txt")))
    tables.show_diff(old, new, text)


def _show_passes(dump: Dump, graph: DumpedGraph) -> None:
    found = passes_of(dump.folder / "passes", graph.manifest["hlo_module"])
    if not found:
        raise NotADump(
            f"{dump.folder} has no dump of XLA's passes for graph {graph.number}; "
            f"`python -m lazytpu run --dump {dump.folder} --passes SCRIPT` writes one"
        )
    tables.show_passes(graph, found)
