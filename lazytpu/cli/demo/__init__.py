"""``demo``: train a small network for some seconds, and show what lazytpu saw of it."""

from __future__ import annotations

import math
import shutil
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

import lazytpu
from lazytpu.cli.run import Script
from lazytpu.cli.tables import console
from lazytpu.debug.folder import Dump, open_dump
from lazytpu.debug.report import write_report
from lazytpu.observe.metrics_tables import table

_SCRIPT = Path(__file__).with_name("train.py")
# What a step's times are called here, and the fields of the dump that they add up.
_PARTS = {
    "Python, torch, recording": ("python_s", "recording_s", "cutting_s"),
    "lowering and compiling": ("lowering_s", "compiling_s", "loading_s"),
    "starting and waiting for the device": ("dispatching_s", "interpreting_s", "waiting_s"),
    "copies to and from the device": ("transferring_s",),
}


def demo(
    seconds: Annotated[float, typer.Option(help="How long to train.", min=0.1)] = 10.0,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="DIR", help="Folder for the script, its graphs and the report.")
    ] = Path("lazytpu-demo"),
    show: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
) -> None:
    """Train a small network on handwritten digits, then write a report: graphs, recompiles, where the time went.

    It downloads nothing. The script that it runs is `DIR/train.py`, for you to read and change.
    """
    graphs, script, page = out / "graphs", out / "train.py", out / "report.html"
    if graphs.exists() and not (graphs / "manifest.json").exists():
        raise typer.BadParameter(f"{graphs} is no dump of lazytpu's", param_hint="--out")
    shutil.rmtree(graphs, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    script.write_text(_SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
    lazytpu.config.dump = str(graphs)
    typer.echo(f"$ python -m lazytpu run --dump {graphs} {script} {seconds:g}")
    Script(str(script), [f"{seconds:g}"]).execute()
    lazytpu.config.dump = ""
    dump = open_dump(graphs)
    write_report(dump, page, title="lazytpu demo")
    _summarize(dump)
    typer.echo(f"the report: {page}")
    if show:
        webbrowser.open(page.resolve().as_uri())


def _summarize(dump: Dump) -> None:
    """Print the graphs with their causes, and where the time went."""
    out = console()
    rows = []
    for graph in dump.graphs:
        timed = dump.compiles.get(graph.name, {})
        compile_s = timed.get("lower_s", 0.0) + timed.get("compile_s", 0.0)
        about = graph.manifest
        rows.append([str(about["number"]), about["cause"]["text"], str(about["ops"]), f"{compile_s:.2f}"])
    out.print(table(["graph", "compiled because", "ops", "compile s"], rows, left=2))
    steps = dump.steps
    total = math.fsum(step["total_s"] for step in steps)
    times = {name: math.fsum(step[f] or 0.0 for step in steps for f in fields) for name, fields in _PARTS.items()}
    shares = [[name, f"{spent:.2f}", f"{spent / total:.0%}"] for name, spent in times.items()]
    out.print(table([f"{len(steps)} steps", "s", "share"], shares))
