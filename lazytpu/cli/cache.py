"""``cache``: show or empty the disk cache."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from lazytpu.observe.metrics_tables import size
from lazytpu.runtime.disk_cache import store

app = typer.Typer(help="Show or empty the disk cache of compiled programs.", no_args_is_help=True)


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Show where the disk cache is and how much it holds."""
    found = store.info()
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1))
        return
    typer.echo(f"folder   {found.folder or '-'}")
    typer.echo(f"enabled  {'yes' if found.enabled else 'no (lazytpu.config.disk_cache)'}")
    programs = f"{found.files:,} program{'' if found.files == 1 else 's'}"
    typer.echo(f"holds    {programs}, {size(found.bytes)} of {size(found.limit_bytes)}")
    if found.problem:
        typer.echo(f"disabled {found.problem}")


@app.command()
def clear() -> None:
    """Delete every program in the disk cache."""
    try:
        deleted = store.clear()
    except (OSError, RuntimeError) as error:
        typer.echo(f"cannot empty the disk cache: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"deleted {deleted} program{'' if deleted == 1 else 's'}")
