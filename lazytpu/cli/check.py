"""``check``: list what of a script for another system works here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lazytpu.cli import tables
from lazytpu.compat import checker
from lazytpu.observe.metrics_tables import table

_STYLES = {checker.WORKS: "green", checker.DIFFERS: "yellow", checker.LACKS: "red"}


def check(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file; it is read, not run.")],
    all_names: Annotated[bool, typer.Option("--all", help="Also list the names that work as they are.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """List which names of a torch_xla, torch_tpu or torch_mlu script work here, and which do not.

    For a TensorFlow script, list what to write instead of each name.

    The exit code is 1 when something is missing, and 2 when the script cannot be read.
    """
    try:
        findings = checker.check_script(script)
    except (OSError, SyntaxError, ValueError) as error:
        typer.echo(f"check: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        shown = [f for f in findings if all_names or f.verdict != checker.WORKS]
        if shown:
            rows = [[str(f.line), f.name, f"[{_STYLES[f.verdict]}]{f.verdict}[/]", f.advice] for f in shown]
            tables.console().print(table(["line", "name", "here", ""], rows, left=4))
        count = {verdict: sum(f.verdict == verdict for f in findings) for verdict in _STYLES}
        typer.echo(f"{script}: " + ", ".join(f"{n} {verdict}" for verdict, n in count.items()))
    if any(f.verdict == checker.LACKS for f in findings):
        raise typer.Exit(1)
