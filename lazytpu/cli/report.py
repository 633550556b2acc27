"""``report``: write a dump as one HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from lazytpu.debug.folder import NotADump, open_dump
from lazytpu.debug.report import write_report


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A dump, written by `run --dump DIR`.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="The page to write; DIR/report.html by default.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A profile of the same run (`run --profile DIR`), for measured times."),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page; the folder's name by default.")] = "",
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write one HTML page about a dump (`run --dump DIR`): steps, graphs, costs, recompiles, code.

    The page is complete: it loads nothing from the network.
    """
    page = out or folder / "report.html"
    try:
        dump = open_dump(folder)
        write_report(dump, page, profile, title)
    except NotADump as error:
        raise typer.BadParameter(str(error), param_hint="DIR") from None
    typer.echo(f"{page}  ({len(dump.graphs)} graphs, {page.stat().st_size / 1e6:.1f} MB)")
    if show:
        webbrowser.open(page.resolve().as_uri())
